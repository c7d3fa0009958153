"""One set of GPUs for each xdist worker. The devices are names, and nothing asks them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plugin.conftest import RunPytest

_XDIST = ("-p", "xdist.plugin", "-p", "preempt_harness")
_TESTS = """
import os, pathlib, pytest

@pytest.mark.parametrize("number", range(6))
def test_it(number):
    if number == 1 and not pathlib.Path("crashed").exists():
        pathlib.Path("crashed").write_text("")
        os._exit(1)
"""
# Every process that runs tests says which devices it sees.
_CONFTEST = """
import os, pathlib

def pytest_sessionstart(session):
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        # Not by the environment: the session around this one may be a worker itself.
        worker = getattr(session.config, "workerinput", {}).get("workerid", "controller")
        pathlib.Path(f"devices-{worker}").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text(_CONFTEST)
    (tmp_path / "test_it.py").write_text(_TESTS)
    return tmp_path


def _seen(folder: Path) -> dict[str, str]:
    """Process -> devices that it saw."""
    return {file.name.partition("-")[2]: file.read_text() for file in folder.glob("devices-*")}


def test_a_crashed_worker_s_successor_takes_its_set(run_pytest: RunPytest, project: Path) -> None:
    completed = run_pytest(*_XDIST, "-n", "1", "--preempt-devices", "5", TMPDIR=str(project))
    assert "replacing crashed worker gw0" in completed.stdout, completed.stdout + completed.stderr
    assert "5 passed" in completed.stdout
    assert _seen(project) == {"gw0": "5", "gw1": "5"}


def test_workers_side_by_side_share_no_device(run_pytest: RunPytest, project: Path) -> None:
    (project / "crashed").write_text("")
    completed = run_pytest(*_XDIST, "-n", "2", "--preempt-devices", "5,6,7", TMPDIR=str(project))
    assert completed.returncode == 0, completed.stdout + completed.stderr
    seen = _seen(project)
    assert seen.keys() == {"gw0", "gw1"}
    assert sorted(seen.values()) == ["5", "6"]


@pytest.mark.parametrize(("tp", "workers"), [("1", 4), ("2", 2), ("3", 1)])
def test_auto_is_one_worker_for_each_set(
    tp: str, workers: int, run_pytest: RunPytest, project: Path
) -> None:
    (project / "crashed").write_text("")
    completed = run_pytest(
        *_XDIST, "-n", "auto", "--preempt-devices", "auto", "--preempt-tp", tp,
        TMPDIR=str(project), CUDA_VISIBLE_DEVICES="2,3,4,5",
    )  # fmt: skip
    assert completed.returncode == 0, completed.stdout + completed.stderr
    seen = _seen(project)
    assert seen.pop("controller") == "2,3,4,5"
    assert len(set(seen.values())) == len(seen) == workers
    assert all(len(devices.split(",")) == int(tp) for devices in seen.values())


def test_the_largest_engine_of_the_matrix_sizes_the_sets(
    run_pytest: RunPytest, tmp_path: Path
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\npreempt_matrix =\n    tp = 1, 2\n")
    (tmp_path / "test_it.py").write_text("def test_it():\n    pass\n")
    completed = run_pytest(
        *_XDIST, "-n", "auto", "--preempt-devices", "0,1,2,3", TMPDIR=str(tmp_path)
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "2 workers" in completed.stdout


def test_more_workers_than_sets_and_too_few_devices_are_refused(
    run_pytest: RunPytest, tmp_path: Path
) -> None:
    (tmp_path / "test_it.py").write_text("def test_it():\n    pass\n")
    for arguments, text in (
        (("-n", "3", "--preempt-devices", "0,1"), "3 workers, and 2 device sets"),
        (("-n", "auto", "--preempt-devices", "0", "--preempt-tp", "2"), "one set takes 2"),
        (("--preempt-devices", "0", "--preempt-tp", "2"), "one set takes 2"),
    ):
        completed = run_pytest(*_XDIST, *arguments, TMPDIR=str(tmp_path))
        assert completed.returncode != 0
        assert text in completed.stdout + completed.stderr


def test_a_session_without_xdist_takes_one_set(run_pytest: RunPytest, project: Path) -> None:
    (project / "crashed").write_text("")
    completed = run_pytest("-p", "preempt_harness", "--preempt-devices", "8,9", TMPDIR=str(project))
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert _seen(project) == {"controller": "8"}
