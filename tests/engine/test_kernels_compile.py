"""Every Triton kernel compiles to a GPU's machine code; no GPU is needed for that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

# What one program may use on every GPU from the A10 (capability 8.6) on.
_SHARED_BYTES = 99 * 1024


def test_all_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    script = Path(__file__).with_name("compile_kernels.py")
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    completed = subprocess.run(
        [sys.executable, str(script), "90"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert completed.returncode == 0, completed.stderr
    kernels = [json.loads(line) for line in completed.stdout.splitlines()]
    assert len(kernels) == 2 * 8
    for kernel in kernels:
        assert kernel["shared"] <= _SHARED_BYTES, kernel
        if kernel["kernel"] == "finish":
            # Merging is done here and in `attend`; it rounds alike only if nothing is fused.
            assert kernel["fused"] == 0, kernel
