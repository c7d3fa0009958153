"""Helpers that run pytest in pytest, in processes of their own, with a chosen environment."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE_PATHS = (str(ROOT), str(ROOT / "engine"))

RunPytest = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_pytest(tmp_path: Path) -> RunPytest:
    """Runs pytest in an empty folder; the harness comes from PYTHONPATH.

    The returned function takes pytest's arguments, and `autoload` (whether installed plugins load),
    `module` (`python -m pytest` rather than `pytest`), and more environment variables.
    """

    def run(
        *arguments: str, autoload: bool = False, module: bool = True, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(SOURCE_PATHS),
            **({} if autoload else {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}),
            **environment,
        }
        env.pop("PYTEST_ADDOPTS", None)
        program = (
            [sys.executable, "-m", "pytest"]
            if module
            else [str(Path(sys.executable).parent / "pytest")]
        )
        return subprocess.run(
            [*program, "-p", "no:cacheprovider", *arguments],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    return run
