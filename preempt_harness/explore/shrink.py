"""Makes a failing trial small: fewer requests, shorter prompts and outputs, fewer actions.

Greedy and deterministic: a list of passes proposes simpler trials, the first that still fails in
the same way is kept, and passes repeat until none helps. A trial "fails in the same way" when it
shows the first finding code of the original failure, so that one bug is not traded for another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from preempt_harness.adapters.protocol import EngineAdapter
from preempt_harness.budget import BudgetError, KVBudget
from preempt_harness.errors import HarnessError
from preempt_harness.explore.search import Failure, TrialRunner
from preempt_harness.plan import Action, PreemptionPlan, Squeeze
from preempt_harness.trial import Trial
from preempt_harness.workload import RequestSpec, SamplingSpec, Workload

Proposals = Iterator[Trial]


@dataclass(frozen=True, order=True)
class Size:
    """How big a failing trial is; compared field by field."""

    requests: int
    preemptions: int
    tokens: int


def size_of(failure: Failure) -> Size:
    """Requests, preemptions that happened, and tokens of prompts and outputs."""
    return Size(
        requests=failure.num_requests,
        preemptions=failure.num_preemptions,
        tokens=sum(map(_num_tokens, failure.trial.workload.requests)),
    )


def shrink(
    failure: Failure, runner: TrialRunner, *, max_trials: int = 300, max_cpu_s: float = 60.0
) -> Failure:
    """The smallest failure that was found.

    Args:
        failure: to begin with.
        runner: of the same engine.
        max_trials: most trials to run.
        max_cpu_s: no trial begins after so many seconds of this process's processor time; an
            engine that never gets on takes many steps to show it.
    """
    return _Shrinker(failure, runner, max_trials, max_cpu_s).run()


class _Shrinker:
    def __init__(
        self, failure: Failure, runner: TrialRunner, max_trials: int, max_cpu_s: float
    ) -> None:
        self._best = failure
        self._runner = runner
        self._code = failure.codes[0]
        self._left = max_trials
        self._ends = time.process_time() + max_cpu_s
        self._seen = {msgspec.json.encode(failure.trial)}

    def run(self) -> Failure:
        progress = True
        while progress and not self._is_over:
            progress = False
            for propose in _PASSES:
                while not self._is_over and self._improve(propose, lambda _: True):
                    progress = True
            for propose in _ATTEMPTS:
                while not self._is_over and self._improve(propose, self._has_fewer_preemptions):
                    progress = True
        return self._best

    @property
    def _is_over(self) -> bool:
        return self._left <= 0 or time.process_time() >= self._ends

    def _has_fewer_preemptions(self, failure: Failure) -> bool:
        return failure.num_preemptions < self._best.num_preemptions

    def _improve(
        self,
        propose: Callable[[Trial, EngineAdapter], Proposals],
        is_better: Callable[[Failure], bool],
    ) -> bool:
        """Keep the first proposal that still fails and is better; False when none is."""
        for trial in propose(self._best.trial, self._runner.adapter):
            if self._is_over:
                return False
            if not self._is_new(trial) or not _is_valid(trial):
                continue
            self._left -= 1
            failure = self._runner.failure(trial)
            if failure is not None and self._code in failure.codes and is_better(failure):
                self._best = failure
                return True
        return False

    def _is_new(self, trial: Trial) -> bool:
        key = msgspec.json.encode(trial)
        if key in self._seen:
            return False
        self._seen.add(key)
        return True


def _is_valid(trial: Trial) -> bool:
    try:
        PreemptionPlan.parse(trial.plan).validate(
            trial.workload, block_size=trial.settings.block_size
        )
    except HarnessError:
        return False
    return True


# Passes: each yields simpler trials, the boldest first --------------------------------------------


def _drop_requests(trial: Trial, adapter: EngineAdapter) -> Proposals:
    requests = trial.workload.requests
    if len(requests) < 2:
        return
    for dropped in reversed(requests):
        kept = [request for request in requests if request is not dropped]
        workload = Workload(
            requests=kept,
            operations=[item for item in trial.workload.operations if item.request != dropped.id],
        )
        plan = [
            action
            for action in PreemptionPlan.parse(trial.plan).actions
            if getattr(action, "request", "") != dropped.id
        ]
        yield from _refit(_with(trial, workload=workload, plan=_encode(plan)), adapter)


def _drop_actions(trial: Trial, adapter: EngineAdapter) -> Proposals:
    actions = PreemptionPlan.parse(trial.plan).actions
    if actions:
        yield _with(trial, plan="")
    for index in range(len(actions)):
        yield _with(trial, plan=_encode([*actions[:index], *actions[index + 1 :]]))


def _drop_operations(trial: Trial, adapter: EngineAdapter) -> Proposals:
    operations = trial.workload.operations
    for index in range(len(operations)):
        kept = [*operations[:index], *operations[index + 1 :]]
        yield _with(trial, workload=Workload(requests=trial.workload.requests, operations=kept))


def _plain_settings(trial: Trial, adapter: EngineAdapter) -> Proposals:
    plain: dict[str, Any] = {
        "options": _where_ranks_are(trial),
        "speculative_config": None,
        "async_scheduling": 0,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 2048,
        "watermark": 0.0,
        "max_model_len": None,
        "max_waiting_requests": None,
        "enable_prefix_caching": False,
        "tensor_parallel_size": 1,
    }
    if not _has_priorities(trial.workload):
        plain["scheduling_policy"] = "fcfs"
    for name, value in plain.items():
        if getattr(trial.settings, name) != value:
            settings = msgspec.structs.replace(trial.settings, **{name: value})
            yield from _refit(_with(trial, settings=settings), adapter)
    for limit in _shorter(trial.settings.max_waiting_requests or 0):
        settings = msgspec.structs.replace(trial.settings, max_waiting_requests=limit)
        yield _with(trial, settings=settings)
    options = trial.settings.options
    needed = _where_ranks_are(trial)
    for left_out in [name for name in options if name not in needed] if len(options) > 1 else ():
        kept = {name: value for name, value in options.items() if name != left_out}
        yield _with(trial, settings=msgspec.structs.replace(trial.settings, options=kept))


def _where_ranks_are(trial: Trial) -> dict[str, Any]:
    """The option that keeps several ranks in this process: without it, every trial starts them."""
    several = trial.settings.tensor_parallel_size > 1
    return {
        name: value
        for name, value in trial.settings.options.items()
        if several and name == "worker_processes"
    }


def _plain_requests(trial: Trial, adapter: EngineAdapter) -> Proposals:
    for index, request in enumerate(trial.workload.requests):
        plain = SamplingSpec(max_tokens=request.sampling.max_tokens)
        if request.sampling != plain:
            yield _with_request(trial, index, msgspec.structs.replace(request, sampling=plain))
        if request.arrival_step:
            yield _with_request(trial, index, msgspec.structs.replace(request, arrival_step=0))
        if request.priority:
            yield _with_request(trial, index, msgspec.structs.replace(request, priority=0))


def _has_priorities(workload: Workload) -> bool:
    """Whether it asks for them; an engine may refuse them where it does not heed them."""
    return any(request.priority for request in workload.requests) or any(
        operation.kind == "set_priority" for operation in workload.operations
    )


def _shorten_outputs(trial: Trial, adapter: EngineAdapter) -> Proposals:
    for index, request in enumerate(trial.workload.requests):
        sampling = request.sampling
        for length in _shorter(sampling.max_tokens):
            changed = msgspec.structs.replace(
                sampling, max_tokens=length, min_tokens=min(sampling.min_tokens, length)
            )
            yield from _refit(
                _with_request(trial, index, msgspec.structs.replace(request, sampling=changed)),
                adapter,
            )


def _shorten_prompts(trial: Trial, adapter: EngineAdapter) -> Proposals:
    block = trial.settings.block_size
    for index, request in enumerate(trial.workload.requests):
        length = request.num_prompt_tokens
        for kept in dict.fromkeys((*_shorter(length), length - block)):
            if kept < 1:
                continue
            shorter = msgspec.structs.replace(
                request, prompt_token_ids=request.prompt_token_ids[:kept], text=""
            )
            yield from _refit(_with_request(trial, index, shorter), adapter)


def _fewer_forced(trial: Trial, adapter: EngineAdapter) -> Proposals:
    """Random and periodic actions with a smaller count."""
    actions = PreemptionPlan.parse(trial.plan).actions
    for index, action in enumerate(actions):
        count = getattr(action, "max_count", 0)
        for fewer in _shorter(count):
            changed: Action = msgspec.structs.replace(action, max_count=fewer)
            yield _with(trial, plan=_encode([*actions[:index], changed, *actions[index + 1 :]]))


def _shorten_squeezes(trial: Trial, adapter: EngineAdapter) -> Proposals:
    """Blocks are given back earlier, or taken later."""
    actions = PreemptionPlan.parse(trial.plan).actions
    for index, action in enumerate(actions):
        if not isinstance(action, Squeeze):
            continue
        for length in _shorter(action.stop - action.start):
            for start in (action.start, action.stop - length):
                changed: Action = Squeeze(action.blocks, start, start + length)
                yield _with(trial, plan=_encode([*actions[:index], changed, *actions[index + 1 :]]))


def _larger_pools(trial: Trial, adapter: EngineAdapter) -> Proposals:
    """With more blocks fewer requests lose theirs; and there is no need of more than roomy ones."""
    admission = adapter.admission_model(trial.settings)
    most = KVBudget.roomy(trial.workload, admission).num_blocks
    now = trial.settings.num_blocks
    for count in sorted({now + 1, now + 2, (now + most) // 2, most - 1}, reverse=True):
        if now < count <= most:
            yield _with_blocks(trial, KVBudget.solve(trial.workload, admission, count))


def _later_arrivals(trial: Trial, adapter: EngineAdapter) -> Proposals:
    """Who comes later may find more room."""
    for index, request in enumerate(trial.workload.requests):
        if index:
            later = msgspec.structs.replace(request, arrival_step=request.arrival_step + 1)
            yield _with_request(trial, index, later)


def _more_blocks(trial: Trial, adapter: EngineAdapter) -> Proposals:
    """A pool in which nothing is preempted but what the plan forces."""
    if trial.plan:
        room = KVBudget.roomy(trial.workload, adapter.admission_model(trial.settings))
        if room.num_blocks > trial.settings.num_blocks:
            yield _with_blocks(trial, room)


_PASSES = (
    _drop_requests,
    _drop_actions,
    _drop_operations,
    _plain_settings,
    _shorten_outputs,
    _shorten_prompts,
    _plain_requests,
    _fewer_forced,
    _shorten_squeezes,
    _more_blocks,
)
"""What they propose is simpler whatever comes of it."""

_ATTEMPTS = (_larger_pools, _later_arrivals)
"""What they propose is kept only if there are fewer preemptions."""


# Helpers ------------------------------------------------------------------------------------------


def _refit(trial: Trial, adapter: EngineAdapter) -> Proposals:
    """The trial with its block count, with one that preempts, and with nearby ones."""
    admission = adapter.admission_model(trial.settings)
    yield trial
    counts: dict[int, KVBudget] = {}
    for wanted in ("tight", "minimal"):
        try:
            budget = KVBudget.solve(trial.workload, admission, wanted)
        except BudgetError:
            continue
        counts[budget.num_blocks] = budget
    for number, budget in counts.items():
        if number < trial.settings.num_blocks:
            yield _with_blocks(trial, budget)


def _with_blocks(trial: Trial, budget: KVBudget) -> Trial:
    settings = msgspec.structs.replace(trial.settings, num_blocks=budget.num_blocks)
    return _with(trial, settings=settings, budget=budget.to_builtins())


def _with(trial: Trial, **changes: Any) -> Trial:
    return msgspec.structs.replace(trial, **changes)


def _with_request(trial: Trial, index: int, request: RequestSpec) -> Trial:
    requests = list(trial.workload.requests)
    requests[index] = request
    return _with(trial, workload=Workload(requests=requests, operations=trial.workload.operations))


def _shorter(length: int) -> list[int]:
    """Half of it, and one less."""
    return list(dict.fromkeys(value for value in (length // 2, length - 1) if value >= 1))


def _encode(actions: list[Action]) -> str:
    return PreemptionPlan(actions).encode()


def _num_tokens(request: RequestSpec) -> int:
    return request.num_prompt_tokens + request.sampling.max_tokens
