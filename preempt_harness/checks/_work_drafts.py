"""Work of drafts: a draft model that is the target itself is never wrong, if its cache is right.

Wrong drafts cost time and change no output, so nothing else tells of a draft model that lost or
mixed its KV cache. Judged where the draft model is the target's own, whole and on as many ranks,
logits do not depend on the batch, and nothing but noise stands between logits and tokens.
"""

from __future__ import annotations

from preempt_harness.checks.drafts import DRAFT_KINDS, DraftLedger
from preempt_harness.checks.finding import CheckResult, Code, Listing, request_of
from preempt_harness.checks.trace import Trace
from preempt_harness.record import Header


def drafts_for_itself(header: Header) -> bool:
    """Whether the target is its own draft model."""
    speculative = header.config.get("speculative_config")
    if not isinstance(speculative, dict) or not header.batch_invariant or header.num_ranks > 1:
        return False
    return (
        speculative.get("method") == "draft_model"
        and speculative.get("model") == header.config.get("model")
        and speculative.get("num_hidden_layers") is None
        and speculative.get("acceptance_rate", 1) == 1
    )


def check_own_drafts(trace: Trace) -> CheckResult:
    """No draft is another token than its position's."""
    listing = Listing()
    specs = trace.specs
    ledger = DraftLedger()
    for event in trace.of(*DRAFT_KINDS):
        ledger.take(event)
    for wrong in ledger.wrong:
        spec = specs.get(request_of(wrong.seq))
        if spec is None or spec.sampling.changes_logits:
            continue
        listing.report(
            Code.WORK_DRAFTS,
            wrong.step,
            f"token {wrong.token_id} is drafted for position {wrong.position} by the target's own "
            f"model, and {wrong.own_token_id} is chosen: the draft model's cache is not what it "
            f"should be",
            once=wrong.seq,
            seq=wrong.seq,
            position=wrong.position,
        )
    listing.count("drafts judged", ledger.totals["num_accepted_tokens"] + len(ledger.wrong))
    return listing.result("work", "own drafts")
