"""What an engine's own rules lead to is foretold only for the outputs that they are played with."""

from __future__ import annotations

import msgspec

from preempt_harness.adapters.embedded import EmbeddedAdapter
from preempt_harness.harness import PreemptHarness
from preempt_harness.prediction import predict

replace = msgspec.structs.replace


def test_a_trial_whose_outputs_are_others_is_not_foretold() -> None:
    """An output that left the baseline's at a near tie may end sooner, and so may the trial."""
    adapter = EmbeddedAdapter()
    harness = PreemptHarness(adapter, {"model": "exact", "block_size": 4})
    result = harness.run(harness.workload(requests=3, prompt_tokens=9, max_tokens=12))
    result.assert_clean()
    admission = adapter.admission_model(result.trial.settings)
    assert predict(result.trial, result.record, admission) is not None
    first = result.record.results["r0"]
    shorter = replace(first.outputs[0], token_ids=first.outputs[0].token_ids[:-1])
    result.record.results["r0"] = replace(first, outputs=[shorter])
    assert predict(result.trial, result.record, admission) is None
