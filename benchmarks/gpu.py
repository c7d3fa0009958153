"""Everything that needs a GPU, with the Python that runs this: tests, the suite, benchmarks.

    make gpu PYTHON=/path/to/python
    PYTHONPATH=.:engine python -m benchmarks.gpu [--only kernels gpu-tests suite benchmarks]

Nothing is installed. What the machine lacks is named, and the parts that need it are not run. Ends
with one table; its status is 0 only if there is a GPU and every part that was run passed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import machine, print_table

_ROOT = Path(__file__).parents[1]
_PACKAGES = ("torch", "triton", "flash_attn", "transformers", "numpy", "pytest", "msgspec")
# Tests of kernels use the GPU where there is one; nothing marks them as its own.
_KERNEL_TESTS = (
    "test_triton_attention.py",
    "test_triton_layers.py",
    "test_triton_engine.py",
    "test_block_mover.py",
    "test_kernels_compile.py",
    "test_swap_space.py",
)
# Warnings of other versions than those the project is developed with are no failures here.
_PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default")


@dataclass(frozen=True)
class Part:
    """One part of the run.

    Attributes:
        needs: packages without which it is not run.
        command: pytest's arguments, or a module to run.
        is_pytest: whether it is the one or the other.
    """

    needs: tuple[str, ...]
    command: tuple[str, ...]
    is_pytest: bool = True


PARTS: Mapping[str, Part] = {
    "kernels": Part(
        ("triton", "pytest", "hypothesis", "pytest_timeout", "transformers"),
        tuple(f"tests/engine/{name}" for name in _KERNEL_TESTS),
    ),
    "gpu-tests": Part(
        ("pytest", "hypothesis", "pytest_timeout", "transformers"),
        ("-m", "gpu", "tests/engine"),
    ),
    "suite": Part(
        ("triton", "pytest", "hypothesis", "msgspec", "filelock", "psutil", "transformers"),
        (
            *("-c", "benchmarks/gpu.ini", "-p", "preempt_harness", "--pyargs"),
            *("preempt_harness.suite", "--preempt-devices", "auto"),
        ),
    ),
    "benchmarks": Part(("triton", "transformers"), ("benchmarks.gpu_speed",), is_pytest=False),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    arguments = parser.parse_args()
    print(machine())
    print(", ".join(f"{name} {_version(name)}" for name in _PACKAGES))
    gpu = _gpu()
    if not gpu:
        print("No CUDA device that torch can use: nothing was run.")
        return 1
    print(gpu)
    rows, failed = [], False
    for name in arguments.only:
        outcome, seconds = _run(PARTS[name])
        failed |= outcome.startswith("FAILED")
        rows.append((name, outcome, f"{seconds:.0f}"))
    print()
    print(gpu)
    print_table(("part", "outcome", "s"), rows)
    return 1 if failed else 0


def _run(part: Part) -> tuple[str, float]:
    missing = [name for name in part.needs if importlib.util.find_spec(name) is None]
    if missing:
        return f"not run: {', '.join(missing)} missing", 0.0
    start = time.perf_counter()
    outcome = (_run_pytest if part.is_pytest else _run_module)(part.command)
    return outcome, time.perf_counter() - start


def _run_pytest(arguments: Sequence[str]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        status = _call([*_PYTEST, f"--junitxml={report}", *arguments])
        if not report.exists():
            return f"FAILED: pytest ended with status {status}"
        suite = ElementTree.parse(report).getroot()[0]
    count = {key: int(suite.get(key, "0")) for key in ("tests", "failures", "errors", "skipped")}
    passed = count["tests"] - count["failures"] - count["errors"] - count["skipped"]
    counts = (
        f"{passed} passed, {count['failures'] + count['errors']} failed, {count['skipped']} skipped"
    )
    return counts if status == 0 and passed else f"FAILED: {counts}"


def _run_module(arguments: Sequence[str]) -> str:
    status = _call([sys.executable, "-m", *arguments])
    return "figures above" if status == 0 else f"FAILED: status {status}"


def _call(command: Sequence[str]) -> int:
    print("\n$", " ".join(command), flush=True)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), str(_ROOT / "engine")])}
    return subprocess.run(command, cwd=_ROOT, env=env, check=False).returncode


def _gpu() -> str:
    """Name and memory of the first GPU, and how many there are; "" without one."""
    if importlib.util.find_spec("torch") is None:
        return ""
    import torch

    if not torch.cuda.is_available():
        return ""
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    return (
        f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, {memory:.0f} GiB, "
        f"CUDA {torch.version.cuda}"
    )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return "missing"


if __name__ == "__main__":
    sys.exit(main())
