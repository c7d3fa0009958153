"""Strategy "swarm": batches of trials, each batch with a configuration that leaves things out.

What one feature hides shows in a batch without it (swarm testing: Groce, Zhang, Eide, Chen and
Regehr, ISSTA 2012). A batch fixes settings, workload features and kinds of plan actions; its trials
differ in everything else.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from preempt_harness.adapters.protocol import EngineAdapter
from preempt_harness.explore.random_plans import ACTION_KINDS
from preempt_harness.explore.random_settings import random_settings, with_drafts, with_steps_ahead
from preempt_harness.explore.random_trials import random_features, random_trial
from preempt_harness.explore.search import SearchOutcome, TrialRunner, search
from preempt_harness.explore.strategy import SearchTask
from preempt_harness.trial import Trial

TRIALS_PER_BATCH = 20


class Swarm:
    """See the module's docstring; without end."""

    name = "swarm"

    def explore(self, runner: TrialRunner, task: SearchTask) -> SearchOutcome:
        """Batches number 0, 1, ... of the seed."""
        return search(
            _trials(runner.adapter, task),
            runner,
            max_trials=task.max_trials,
            max_cpu_s=task.max_cpu_s,
        )


def _trials(adapter: EngineAdapter, task: SearchTask) -> Iterator[Trial]:
    for batch in itertools.count():
        source = random.Random(f"{task.seed}/swarm/{batch}")
        settings = random_settings(source, adapter, task.model)
        drafts = random.Random(f"{task.seed}/swarm/{batch}/drafts")
        settings = with_drafts(drafts, settings, adapter)
        ahead = random.Random(f"{task.seed}/swarm/{batch}/ahead")
        settings = with_steps_ahead(ahead, settings, adapter)
        features = random_features(source, adapter)
        kinds = [kind for kind in ACTION_KINDS if source.random() < 0.5]
        for number in range(TRIALS_PER_BATCH):
            yield random_trial(
                f"{task.seed}/{batch}/{number}",
                adapter,
                model=task.model,
                settings=settings,
                features=features,
                action_kinds=kinds,
            )
