"""Overrun: positions behind the last that a request has a use for are not computed."""

from __future__ import annotations

import msgspec
from fake_engine import run_fake, work_findings
from fake_trials import make_workload

from preempt_harness.checks import Code, Finding
from preempt_harness.record import Scheduled

replace = msgspec.structs.replace


def judged(end: int, **config: object) -> list[Finding]:
    """r0, of six tokens and four outputs, is computed up to there."""
    record = run_fake(make_workload([6, 9], max_tokens=4))
    record.header = replace(record.header, config=config)
    record.events = [Scheduled(0, "r0.0", 0, 6), Scheduled(1, "r0.0", 6, end)]
    return work_findings(record, "overrun")


def test_the_last_token_is_never_an_input() -> None:
    assert judged(9) == []
    (found,) = judged(10)
    assert (found.code, found.step, found.sequence) == (Code.WORK_OVERRUN, 1, "r0.0")
    assert "no use for any from 9 on" in found.message


def test_a_step_decided_ahead_knows_the_end_as_well() -> None:
    assert judged(9, async_scheduling=1) == []
    assert judged(10, async_scheduling=1)


def test_drafts_may_run_over_the_end() -> None:
    assert judged(12, num_speculative_tokens=3) == []
