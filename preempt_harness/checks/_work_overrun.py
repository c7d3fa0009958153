"""Work: nothing is computed behind the last token that a request may have.

Whatever else ends it, `max_tokens` is known beforehand, and so is the longest length that model and
pool allow. The last token of an output is never an input, so its position needs no step and no
slot. An engine that decides ahead knows that as well: it counts the steps under way. Drafts may run
over the end, as their number may be fixed.
"""

from __future__ import annotations

from preempt_harness.checks.drafts import has_drafts
from preempt_harness.checks.finding import CheckResult, Code, Listing, request_of
from preempt_harness.checks.steady import SteadySteps
from preempt_harness.checks.trace import ScheduledRows, Trace, batches
from preempt_harness.record import Header


def counts_tokens(header: Header) -> bool:
    """Whether a step computes nothing but tokens that are known, or sure to come."""
    return not has_drafts(header)


def check_overrun(trace: Trace) -> CheckResult:
    """No row ends behind the last token but one."""
    listing = Listing()
    ends = {
        name: spec.num_prompt_tokens + max(0, spec.sampling.max_tokens - 1)
        for name, spec in trace.specs.items()
    }
    num_judged = 0
    for rows in trace.of(SteadySteps, ScheduledRows):
        if isinstance(rows, SteadySteps):
            num_judged += rows.num_steps * len(rows.seqs)
            if _go_behind(rows, ends):
                for one in batches(rows.events):
                    if isinstance(one, ScheduledRows):
                        _judge(one, ends, listing)
        else:
            num_judged += len(rows.seqs)
            _judge(rows, ends, listing)
    listing.count("sequences of steps judged", num_judged)
    return listing.result("work", "overrun")


def _judge(rows: ScheduledRows, ends: dict[str, int], listing: Listing) -> None:
    for seq, end in zip(rows.seqs, rows.ends, strict=True):
        last = ends.get(request_of(seq), end)
        if end > last:
            listing.report(
                Code.WORK_OVERRUN,
                rows.step,
                f"positions up to {end} are computed, and by max_tokens it has no use for any from "
                f"{last} on",
                once=seq,
                seq=seq,
            )


def _go_behind(rows: SteadySteps, ends: dict[str, int]) -> bool:
    """Whether somebody has gone too far after the last of these steps."""
    return any(
        end > ends.get(request_of(seq), end) for seq, end in zip(rows.seqs, rows.ends, strict=True)
    )
