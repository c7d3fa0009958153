"""The audit finds what is planted, says when it could not have, and is quiet about a clean engine.

A sample of the catalogue; `preempt-harness audit` runs all of it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from preempt_harness.adapters.embedded import EmbeddedAdapter
from preempt_harness.audit import Audit, AuditPlan, Kill, Outcome, run_audit, table
from preempt_harness.audit.by_tests import TestRunError, look_by_tests
from preempt_harness.audit.yardsticks import YARDSTICKS, run_yardstick
from preempt_harness.cli.main import main
from preempt_harness.faults import Fault, Patch, fault_named, plant

SAMPLE = (
    "worker-keeps-its-table-on-resume",
    "can-grow-one-token-early",
    "digest-too-short",
    "noise-restarts-with-the-prefill",
    "text-lost-after-resume",
    "recompute-counted-as-hits",
)
UNREACHED = Fault(
    name="unreached",
    mechanism="nothing of a trial scores",
    source="mechanism",
    expected=("TOK",),
    patches=(Patch("preempt_engine.llm:LLM.score", "self._check_open()", "pass"),),
)
MISFIT = Fault(
    name="misfit",
    mechanism="was written for another engine",
    source="mechanism",
    expected=("TOK",),
    patches=(Patch("preempt_engine.llm:LLM.step", "self.step_of_old()", "pass"),),
)


def audited(*faults: Fault, trials: int = 30) -> Audit:
    """By search alone, with a little shrinking."""
    return run_audit(
        AuditPlan(faults=faults, methods=("search",), search_trials=trials, max_shrinks=40)
    )


@pytest.mark.parametrize("name", SAMPLE)
def test_a_search_finds_a_fault_and_names_it(name: str) -> None:
    fault = fault_named(name)
    audit = audited(fault, trials=60)
    kill = audit.rows[0].kills["search"]
    assert audit.problems() == []
    assert audit.controls["search"].outcome is Outcome.CLEAN
    assert kill.outcome is Outcome.KILLED
    assert kill.expected(fault.expected), kill.codes
    assert kill.reached >= 1
    assert kill.replay.startswith("preempt1:")


def test_what_was_not_reached_is_not_killed() -> None:
    audit = audited(UNREACHED, trials=3)
    assert audit.rows[0].kills["search"].outcome is Outcome.NOT_EXERCISED
    assert audit.problems() == ["unreached, search: NOT EXERCISED"]


def test_what_does_not_fit_is_not_applied() -> None:
    audit = audited(MISFIT, trials=3)
    assert audit.rows[0].kills["search"].outcome is Outcome.NOT_APPLIED
    assert audit.problems() == ["misfit, search: NOT APPLIED"]


@pytest.mark.parametrize("name", YARDSTICKS)
def test_a_yardstick_finds_what_changes_greedy_outputs_only(name: str) -> None:
    adapter = EmbeddedAdapter()
    assert run_yardstick(name, adapter, "exact", seed=0).outcome is Outcome.SURVIVED
    with plant(fault_named("worker-keeps-its-table-on-resume")):
        assert run_yardstick(name, adapter, "exact", seed=0).outcome is Outcome.KILLED
    with plant(fault_named("recompute-counted-as-hits")):
        assert run_yardstick(name, adapter, "exact", seed=0).outcome is Outcome.SURVIVED


TESTS = """
    def test_preempted(preempt):
        result = preempt.run(
            preempt.workload(requests=2, prompt_tokens=9, max_tokens=8),
            plan="preempt:r1@out=3",
            block_size=4,
        )
        result.assert_preempted()
        {assertion}
"""


def test_own_tests_are_audited(tmp_path: Path) -> None:
    strict = tmp_path / "test_strict.py"
    strict.write_text(_dedented(TESTS.format(assertion="result.assert_clean()")))
    kill = look_by_tests([str(strict)], "recompute-counted-as-hits", timeout_s=300)
    assert kill.outcome is Outcome.KILLED
    assert kill.codes == ("ACC-COUNTER",)
    assert kill.where.endswith("test_strict.py::test_preempted")
    assert kill.reached >= 1
    lax = tmp_path / "test_lax.py"
    lax.write_text(_dedented(TESTS.format(assertion="result.assert_matches_baseline()")))
    kill = look_by_tests([str(lax)], "recompute-counted-as-hits", timeout_s=300)
    assert kill.outcome is Outcome.SURVIVED
    assert (kill.num_trials, kill.reached >= 1) == (1, True)


def test_tests_that_cannot_run_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(TestRunError, match="status"):
        look_by_tests([str(tmp_path / "missing.py")], "", timeout_s=300)


def test_tables_say_what_was_found() -> None:
    audit = audited(fault_named("worker-keeps-its-table-on-resume"), UNREACHED, trials=3)
    text, markdown, json = table.as_text(audit), table.as_markdown(audit), table.as_json(audit)
    assert "of 2 found" in text
    assert "clean (3 trials)" in text
    assert "| `unreached` | nothing of a trial scores | not exercised |" in markdown
    assert '"outcome": "NOT EXERCISED"' in json


def test_an_unexpected_finding_is_marked() -> None:
    kill = Kill(outcome=Outcome.KILLED, codes=("WORK-VAIN",))
    assert kill.expected(("WORK",))
    assert not kill.expected(("TOK", "DEL"))


def test_the_command_lists_and_audits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--list"]) == 0
    assert "prefix_cache/digest-too-short:" in capsys.readouterr().out
    arguments = ["--by", "search", "--search-trials", "40", "--shrink-trials", "0"]
    assert main(["audit", "--faults", "worker-keeps-its-table-on-resume", *arguments]) == 0
    assert "search: 1 of 1 found" in capsys.readouterr().out


def test_the_command_refuses_what_it_cannot_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--faults", "nothing"]) == 2
    assert "No fault fits 'nothing'" in capsys.readouterr().err
    assert main(["audit", "--search-trials", "0"]) == 2
    assert "Give 1 or more" in capsys.readouterr().err


def _dedented(text: str) -> str:
    import textwrap

    return textwrap.dedent(text)
