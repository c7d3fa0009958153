"""Drawn mixtures: settings, shared prefixes, stops, squeezes and plans together.

The seeds are the first five, and those of a greedy search for situation pairs that the scenarios of
the other files leave open; what a mixture is made of depends on what the engine can do.
"""

from __future__ import annotations

import msgspec
import pytest

from preempt_harness.adapters.protocol import EngineSettings
from preempt_harness.explore.random_trials import random_trial
from preempt_harness.harness import PreemptHarness
from preempt_harness.workload import Workload

SEEDS = (0, 1, 2, 3, 4, 348, 893, 605, 80, 33, 119, 130, 153, 286, 313, 621)


@pytest.mark.parametrize("seed", SEEDS)
def test_mixture(preempt: PreemptHarness, seed: int) -> None:
    drawn = random_trial(seed, preempt.adapter, model=preempt.settings().model)
    result = preempt.run(
        _with_plain_operations(drawn.workload),
        drawn.settings.num_blocks,
        drawn.plan,
        expect_preemption=False,
        **_changes(drawn.settings),
    )
    result.assert_matches_baseline()
    result.assert_clean()


def _changes(settings: EngineSettings) -> dict[str, object]:
    return {
        name: getattr(settings, name)
        for name in (
            "block_size",
            "max_num_batched_tokens",
            "max_num_seqs",
            "max_model_len",
            "watermark",
            "scheduling_policy",
            "enable_prefix_caching",
            "options",
        )
    }


def _with_plain_operations(workload: Workload) -> Workload:
    """A reset that preempts would preempt the baseline as well, and a priority may be changed only
    under that policy; `test_state` and `test_priority` have those."""
    kept = [item for item in workload.operations if item.kind in ("abort", "reset_prefix_cache")]
    return msgspec.structs.replace(workload, operations=kept)
