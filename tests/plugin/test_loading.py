"""The plugin loads in every way a user may load it, and loads no more than it needs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.plugin.conftest import RunPytest

A_TEST = """
def test_survives(preempt):
    result = preempt.run(
        preempt.workload(requests=3, prompt_tokens=(6, 12), max_tokens=16), block_size=4
    )
    result.assert_preempted()
    result.assert_matches_baseline()
    result.assert_clean()
"""


def test_from_pythonpath_alone(run_pytest: RunPytest, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(A_TEST)
    completed = run_pytest("-p", "preempt_harness")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "1 trials on embedded/exact: 1 EQUAL" in completed.stdout


@pytest.mark.parametrize("module", [False, True], ids=["pytest", "python-m-pytest"])
def test_beside_a_package_called_engine(
    run_pytest: RunPytest, tmp_path: Path, module: bool
) -> None:
    """A repository that owns a top-level `engine` gets its own, and the harness works."""
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "__init__.py").write_text("MINE = True\n")
    (tmp_path / "conftest.py").write_text("import engine\nassert engine.MINE\n")
    (tmp_path / "test_it.py").write_text(
        "import engine\n" + A_TEST + "\ndef test_own_engine():\n    assert engine.MINE\n"
    )
    completed = run_pytest("-p", "preempt_harness", "--rootdir", str(tmp_path), module=module)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "2 passed" in completed.stdout


def test_with_xdist(run_pytest: RunPytest, tmp_path: Path) -> None:
    """Trials run in workers; their summaries arrive on the controller."""
    for name in ("test_a.py", "test_b.py"):
        (tmp_path / name).write_text(A_TEST)
    completed = run_pytest("-p", "xdist.plugin", "-p", "preempt_harness", "-n", "2", "-v")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "2 trials on embedded/exact: 2 EQUAL" in completed.stdout
    assert completed.stdout.count("preempted: r2@") == 2


def test_the_suite_uses_no_marker_that_the_plugin_does_not_know(run_pytest: RunPytest) -> None:
    """In a folder without configuration of its own, by the strictest rules of collection."""
    completed = run_pytest(
        *("-p", "preempt_harness", "--strict-markers", "-W", "error"),
        *("--collect-only", "-q", "--pyargs", "preempt_harness.suite"),
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "test_natural.py: " in completed.stdout or "test_natural.py::" in completed.stdout


def test_loading_it_twice_is_one_plugin(run_pytest: RunPytest, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(A_TEST)
    completed = run_pytest("-p", "preempt_harness", "-p", "preempt_harness")
    assert completed.returncode == 0, completed.stdout + completed.stderr


def test_inert_until_asked_for(run_pytest: RunPytest, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_plain():\n    pass\n")
    completed = run_pytest("-p", "preempt_harness")
    assert completed.returncode == 0
    assert "preempt_harness" not in completed.stdout.replace("plugins:", "")


def test_header_when_an_option_is_given(run_pytest: RunPytest, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_plain():\n    pass\n")
    completed = run_pytest("-p", "preempt_harness", "--preempt-seed", "3")
    assert "preempt_harness: engine embedded, model exact, tp 1, seed 3" in completed.stdout


@pytest.mark.parametrize("arguments", [("--help",), ("--collect-only", "test_it.py")])
def test_nothing_heavy_is_loaded_before_a_fixture_asks(
    run_pytest: RunPytest, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    (tmp_path / "test_it.py").write_text(A_TEST)
    (tmp_path / "listing.py").write_text(
        "import atexit, sys\n"
        "HEAVY = ('torch', 'numpy', 'transformers', 'hypothesis', 'msgspec', 'rich')\n"
        "def pytest_configure(config):\n"
        "    config.add_cleanup(lambda: print('loaded:', [n for n in HEAVY if n in sys.modules]))\n"
    )
    completed = run_pytest(
        "-p", "preempt_harness", "-p", "listing", *arguments, PYTHONPATH=_with(tmp_path)
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "loaded: []" in completed.stdout


def test_without_torch_the_exact_model_works_and_others_name_the_extra(
    run_pytest: RunPytest, tmp_path: Path
) -> None:
    """What somebody sees who installed the base dependencies alone."""
    (tmp_path / "lacking.py").write_text(
        "import sys\n"
        "for name in ('torch', 'numpy', 'transformers', 'safetensors', 'tqdm'):\n"
        "    sys.modules[name] = None\n"
    )
    (tmp_path / "test_it.py").write_text(
        f"{A_TEST}\n"
        "def test_real(preempt):\n"
        "    preempt.run(preempt.workload(), model='tiny-llama')\n"
    )
    completed = run_pytest("-p", "lacking", "-p", "preempt_harness", PYTHONPATH=_with(tmp_path))
    assert completed.returncode == 1
    assert "1 failed, 1 passed" in completed.stdout, completed.stdout + completed.stderr
    assert 'pip install "preempt-harness[engine]"' in completed.stdout


CORE_MODULES = (
    "workload",
    "generators",
    "admission",
    "budget",
    "plan",
    "prompts",
    "record",
    "checks",
    "situations",
    "trial",
    "baseline",
    "evidence",
    "verdict",
    "result",
    "harness",
    "replay",
    "summary",
    "report",
    "plugin",
    "options",
    "marks",
    "collector",
    "fixtures",
    "session_state",
)


def test_the_core_imports_neither_torch_nor_an_engine() -> None:
    import subprocess

    from tests.plugin.conftest import SOURCE_PATHS

    imports = ", ".join(f"preempt_harness.{name}" for name in CORE_MODULES)
    code = (
        f"import sys; sys.path[:0] = {list(SOURCE_PATHS)!r}; import {imports};"
        "print(sorted(n for n in sys.modules if n.partition('.')[0] in "
        "('torch', 'numpy', 'transformers', 'preempt_engine', 'vllm', 'nanovllm')))"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert completed.stdout.strip() == "[]"


def test_the_engine_knows_nothing_of_the_harness() -> None:
    from tests.plugin.conftest import ROOT

    for path in (ROOT / "engine" / "preempt_engine").rglob("*.py"):
        assert "preempt_harness" not in path.read_text().replace("preempt-harness", ""), path


def _with(path: Path) -> str:
    import os

    from tests.plugin.conftest import SOURCE_PATHS

    return os.pathsep.join([*SOURCE_PATHS, str(path)])
