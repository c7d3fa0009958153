"""What an engine should have done: its own admission model, played over the trial.

Only for engines whose model says that it predicts them, and for trials in which nothing is forced
from outside. Lengths and contents of outputs come from the baseline; where the trial's are others,
the check of tokens says what is to be said.
"""

from __future__ import annotations

from preempt_harness.admission import AdmissionModel, Simulation, simulate
from preempt_harness.record import TrialRecord
from preempt_harness.trial import Trial


def predict(trial: Trial, record: TrialRecord, admission: AdmissionModel) -> Simulation | None:
    """The simulation that the record must equal; None where there is none.

    Args:
        trial: what was run.
        record: what happened, with its baseline.
        admission: the engine's rules.
    """
    baseline = record.baseline
    if not admission.predicts or trial.plan or baseline is None:
        return None
    settings = trial.settings
    if settings.scheduling_policy != "fcfs" or settings.max_waiting_requests is not None:
        return None
    for request in trial.workload.requests:
        sampling = request.sampling
        if sampling.num_sequences > 1 or sampling.prompt_logprobs is not None:
            return None
    if baseline.num_preemptions or baseline.problems:
        return None
    # Who is aborted has no output of known content, which others may continue.
    if any(operation.kind != "reset_prefix_cache" for operation in trial.workload.operations):
        return None
    outputs = {
        request: result.outputs[0].token_ids
        for request, result in baseline.results.items()
        if result.finished and result.outputs and result.outputs[0].token_ids
    }
    for name, token_ids in outputs.items():  # after a near tie it is another trial
        result = record.results.get(name)
        if result is None or not result.outputs or result.outputs[0].token_ids != token_ids:
            return None
    return simulate(trial.workload, admission, record.header.num_blocks, output_token_ids=outputs)
