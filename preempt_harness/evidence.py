"""Fetches the evidence that tells a near tie from a bug: teacher-forced scores by a reference.

Only where outputs differ and the engine does not claim batch invariance; scoring costs a forward
pass over each differing output, with room, and so without a preemption.
"""

from __future__ import annotations

from collections.abc import Callable

from preempt_harness.adapters import protocol
from preempt_harness.adapters.protocol import EngineAdapter, EngineSettings, Session
from preempt_harness.baseline import roomy_settings
from preempt_harness.checks.tokens import TokenVerdict, compare_tokens
from preempt_harness.record import TrialRecord
from preempt_harness.trial import Trial


def gather_scores(
    record: TrialRecord,
    trial: Trial,
    adapter: EngineAdapter,
    open_session: Callable[[EngineSettings], Session] | None = None,
) -> None:
    """Add scores of the differing outputs to the record, if the engine can score.

    Args:
        record: with results and a baseline.
        trial: what was run.
        adapter: of its engine.
        open_session: opens the reference session in place of `adapter.open`.
    """
    if record.header.batch_invariant or protocol.SCORE not in adapter.capabilities:
        return
    differing = {
        comparison.sequence.rpartition(".")[0]
        for comparison in compare_tokens(record)
        if comparison.verdict is not TokenVerdict.EQUAL
    }
    requests = [request for request in trial.workload.requests if request.id in differing]
    if not requests:
        return
    settings = roomy_settings(trial.settings, trial.workload, adapter)
    session = (open_session or adapter.open)(settings)
    try:
        for request in requests:
            token_ids = record.results[request.id].outputs[0].token_ids
            record.scores[request.id] = session.score(request.prompt_token_ids, token_ids)
    finally:
        session.close()
