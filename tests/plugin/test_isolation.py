"""However an engine dies in its child process, its test gets a finding and the next one runs."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.plugin.conftest import RunPytest

CONFTEST = """
from tests.plugin.foreign_adapter import {adapter}

def pytest_preempt_adapters(config):
    return [{adapter}()]
"""

DYING = """
import pytest

BUGS = {bugs!r}
ROUNDS = [name for bug in BUGS for name in (bug, "")]  # after each death, a clean trial

@pytest.mark.parametrize(
    "bug", ROUNDS, ids=[f"{{i // 2}}-{{bug or 'clean'}}" for i, bug in enumerate(ROUNDS)]
)
def test_it(preempt, bug):
    result = preempt.run(
        preempt.workload(requests=2, prompt_tokens=9, max_tokens=12),
        plan="preempt:r1@out=3",
        block_size=4,
        options={{"bug": bug}} if bug else {{}},
    )
    if not bug:
        result.assert_preempted(request="r1")
        result.assert_matches_baseline()
        result.assert_clean(require=["kvsan", "accounting"])
        return
    code, verdict = BUGS[bug]
    [finding] = result.findings
    assert (str(finding.code), finding.step, str(result.verdict)) == (code, 4, verdict)
    # What happened before is there, and was judged.
    assert [str(note) for note in result.preemptions] == ["r1@3 decode"]
    assert "kvsan/content" not in result.report.not_observable
    assert result.report.counted["accounting/worker view: rows compared"] == 7
    assert len(result.record.results["r1"].outputs[0].token_ids) == 3
    with pytest.raises(AssertionError, match=code):
        result.assert_clean()
"""

# Planted fault -> finding, verdict.
SUDDEN = {
    "exception": ("CRASH-EXCEPTION", "ERROR"),
    "segfault": ("CRASH-SIGNAL", "ERROR"),
    "exit": ("CRASH-EXIT", "ERROR"),
}
SILENT = {"c_loop": ("CRASH-HANG", "HANG"), "stall": ("CRASH-HANG", "HANG")}


def engine_processes(folder: Path) -> list[psutil.Process]:
    """Engine processes that were started by a pytest that ran in that folder."""
    found = []
    for process in psutil.process_iter():
        try:
            command = " ".join(process.cmdline())
            if "preempt_harness.adapters.child_main" in command and process.cwd() == str(folder):
                found.append(process)
        except psutil.Error:  # ended meanwhile, or somebody else's
            continue
    return found


def write_files(
    folder: Path, bugs: dict[str, tuple[str, str]], adapter: str = "ForeignAdapter"
) -> None:
    (folder / "conftest.py").write_text(CONFTEST.format(adapter=adapter))
    (folder / "test_it.py").write_text(DYING.format(bugs=bugs))


@pytest.mark.parametrize(
    ("bugs", "timeout_s"),
    [
        (SUDDEN, "60"),
        (SILENT, "3"),  # a live toy step needs microseconds
    ],
    ids=["sudden", "silent"],
)
def test_every_death_is_a_finding_and_the_next_test_runs(
    run_pytest: RunPytest, tmp_path: Path, bugs: dict[str, tuple[str, str]], timeout_s: str
) -> None:
    write_files(tmp_path, bugs)
    completed = run_pytest(
        *("-p", "preempt_harness", "--preempt-isolation", "process"),
        *("--preempt-poll-timeout-s", timeout_s),
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert f"{2 * len(bugs)} passed" in completed.stdout
    assert engine_processes(tmp_path) == []


def test_an_adapter_asks_for_a_process_of_its_own(run_pytest: RunPytest, tmp_path: Path) -> None:
    write_files(tmp_path, {"exit": SUDDEN["exit"]}, "IsolatedForeignAdapter")
    completed = run_pytest("-p", "preempt_harness")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert engine_processes(tmp_path) == []


def test_the_option_overrules_the_adapter(run_pytest: RunPytest, tmp_path: Path) -> None:
    """Without isolation an exception is still a finding, with the same place."""
    write_files(tmp_path, {"exception": SUDDEN["exception"]}, "IsolatedForeignAdapter")
    (tmp_path / "test_here.py").write_text(
        "import os\n"
        "from tests.plugin import foreign_adapter\n"
        "def test_here(preempt, monkeypatch):\n"
        "    opened = []\n"
        "    plain = foreign_adapter.IsolatedForeignAdapter.open\n"
        "    monkeypatch.setattr(\n"
        "        foreign_adapter.IsolatedForeignAdapter, 'open',\n"
        "        lambda self, settings: opened.append(os.getpid()) or plain(self, settings))\n"
        "    result = preempt.run(preempt.workload(max_tokens=8), plan='preempt:r0@out=2')\n"
        "    result.assert_clean()\n"
        "    assert opened == [os.getpid()] * 2\n"
    )
    completed = run_pytest("-p", "preempt_harness", "--preempt-isolation", "none")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "3 passed" in completed.stdout


def test_a_failure_of_an_isolated_engine_is_printed_with_its_replay(
    run_pytest: RunPytest, tmp_path: Path
) -> None:
    write_files(tmp_path, {}, "IsolatedForeignAdapter")
    (tmp_path / "test_it.py").write_text(
        "def test_it(preempt):\n"
        "    preempt.run(\n"
        "        preempt.workload(requests=2, prompt_tokens=9, max_tokens=12),\n"
        "        plan='preempt:r1@out=3', options={'bug': 'exit'},\n"
        "    ).assert_clean()\n"
    )
    completed = run_pytest("-p", "preempt_harness")
    assert completed.returncode == 1
    assert "CRASH-EXIT (step 4): Step 4: the engine's process ended by itself" in completed.stdout
    assert "replay: pytest -p preempt_harness 'test_it.py::test_it' --preempt-replay" in (
        completed.stdout
    )
