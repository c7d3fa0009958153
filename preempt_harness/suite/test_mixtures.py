"""Drawn mixtures: settings, shared prefixes, stops, squeezes and plans together.

What a mixture is made of depends on what the engine can do, and so does whether it preempts; these
seeds do on the embedded engine.
"""

from __future__ import annotations

from typing import Any

import pytest

from preempt_harness.adapters.protocol import EngineSettings
from preempt_harness.explore.random_trials import random_trial
from preempt_harness.harness import PreemptHarness

SEEDS = (1, 2, 3, 4, 6, 7, 8, 10, 11, 12, 15, 16)


@pytest.mark.parametrize("seed", SEEDS)
def test_mixture(preempt: PreemptHarness, seed: int) -> None:
    # Without later draws, so that what a seed gives stays what it was.
    drawn = random_trial(seed, preempt.adapter, model=preempt.settings().model, later=False)
    result = preempt.run(
        drawn.workload,
        drawn.settings.num_blocks,
        drawn.plan,
        expect_preemption=False,
        **_changes(drawn.settings),
    )
    result.assert_matches_baseline()
    result.assert_clean()
    if not result.preemptions:
        pytest.skip(f"draw {seed} preempts nobody on engine {preempt.adapter.name}")


def _changes(settings: EngineSettings) -> dict[str, Any]:
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
