"""The ini table `preempt_matrix`, single cells of it, and the command that lists them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from preempt_harness.cli.main import main
from tests.plugin.conftest import RunPytest

_INI = """[pytest]
preempt_matrix =
    block_size = 2, 4
    mode = recompute, swap
    tp = 1, 2
preempt_matrix_exclude =
    tp=2 mode=swap
"""
_PRINTS = """
def test_it(preempt_settings):
    s = preempt_settings
    print("CELL", s.block_size, s.options["preemption_mode"], s.tensor_parallel_size)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text(_INI)
    (tmp_path / "test_it.py").write_text(_PRINTS)
    return tmp_path


def _cells(output: str) -> list[str]:
    return sorted(line.partition("CELL ")[2] for line in output.splitlines() if "CELL " in line)


def test_tests_of_the_harness_run_for_every_cell_and_others_once(
    run_pytest: RunPytest, project: Path
) -> None:
    (project / "test_other.py").write_text("def test_other():\n    pass\n")
    completed = run_pytest("-p", "preempt_harness", "-s", "-v")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert _cells(completed.stdout) == [
        "2 recompute 1", "2 recompute 2", "2 swap 1", "4 recompute 1", "4 recompute 2", "4 swap 1",
    ]  # fmt: skip
    assert "test_it[tp=1-mode=recompute-block_size=2]" in completed.stdout
    assert "7 passed" in completed.stdout


def test_one_cell_can_be_run_alone(run_pytest: RunPytest, project: Path) -> None:
    cell = "tp=1-mode=swap-block_size=4"
    completed = run_pytest("-p", "preempt_harness", "-s", "--preempt-cell", cell)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert _cells(completed.stdout) == ["4 swap 1"]


def test_a_cell_that_is_left_out_cannot_be_asked_for(run_pytest: RunPytest, project: Path) -> None:
    cell = "tp=2-mode=swap-block_size=4"
    completed = run_pytest("-p", "preempt_harness", "--preempt-cell", cell)
    assert completed.returncode != 0
    assert f"'{cell}' is no cell of the matrix" in completed.stdout + completed.stderr


def test_markers_and_the_command_line_win_over_the_table(
    run_pytest: RunPytest, project: Path
) -> None:
    (project / "test_it.py").write_text(
        "import pytest\n"
        "pytestmark = [pytest.mark.preempt(block_size=8), pytest.mark.preempt_matrix(seed=[1, 2])]"
        f"\n{_PRINTS.replace('s.block_size', 's.block_size, s.seed')}"
    )
    completed = run_pytest("-p", "preempt_harness", "-s", "--preempt-tp", "1")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert _cells(completed.stdout) == [
        "8 1 recompute 1", "8 1 swap 1", "8 2 recompute 1", "8 2 swap 1",
    ]  # fmt: skip


def test_options_of_a_trial_add_to_those_of_the_cell(run_pytest: RunPytest, project: Path) -> None:
    (project / "test_it.py").write_text(
        "def test_it(preempt):\n"
        "    options = preempt.settings(options={'poison': True}).options\n"
        "    assert options['poison'] is True\n"
        "    assert options['preemption_mode'] in ('recompute', 'swap')\n"
        "    changed = preempt.settings(options={'preemption_mode': 'other'}).options\n"
        "    assert changed == {'preemption_mode': 'other'}\n"
    )
    completed = run_pytest("-p", "preempt_harness")
    assert completed.returncode == 0, completed.stdout + completed.stderr


def test_a_wrong_table_is_a_usage_error(run_pytest: RunPytest, project: Path) -> None:
    (project / "pytest.ini").write_text("[pytest]\npreempt_matrix =\n    blocks = 2\n")
    completed = run_pytest("-p", "preempt_harness")
    assert completed.returncode != 0
    assert "blocks is no axis" in completed.stdout + completed.stderr


def test_a_preempted_trial_runs_in_every_mode_of_the_table(
    run_pytest: RunPytest, tmp_path: Path
) -> None:
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\npreempt_matrix =\n    model = exact\n    mode = recompute, swap\n"
    )
    (tmp_path / "test_it.py").write_text(
        "def test_it(preempt, preempt_settings):\n"
        "    result = preempt.run(preempt.workload(requests=3, max_tokens=30), 'tight')\n"
        "    mode = preempt_settings.options['preemption_mode']\n"
        "    result.assert_preempted(at_least=1, mode=mode)\n"
        "    result.assert_matches_baseline()\n"
        "    result.assert_clean()\n"
    )
    completed = run_pytest("-p", "preempt_harness")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "2 passed" in completed.stdout


@pytest.mark.parametrize("form", ["text", "json", "github"])
def test_the_command_lists_the_cells(
    form: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["matrix", "--rootdir", str(project), "--format", form]) == 0
    printed = capsys.readouterr().out
    if form == "text":
        assert "2 device(s)  tp=2-mode=recompute-block_size=4" in printed.splitlines()
        return
    listed = json.loads(printed)
    listed = listed["include"] if form == "github" else listed
    assert len(listed) == 6
    assert listed[0] == {
        "id": "tp=1-mode=recompute-block_size=2",
        "devices": 1,
        "tp": 1,
        "mode": "recompute",
        "block_size": 2,
    }
    assert form == "json" or len(printed.splitlines()) == 1


def test_the_command_fails_without_a_matrix_and_for_a_wrong_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    assert main(["matrix", "--rootdir", str(tmp_path)]) == 1
    (tmp_path / "pytest.ini").write_text("[pytest]\npreempt_matrix =\n    blocks = 2\n")
    assert main(["matrix", "--rootdir", str(tmp_path)]) == 2
    assert "blocks is no axis" in capsys.readouterr().err
