"""Hypothesis strategies for workloads, budgets, plans, engine settings and whole trials.

Owns what is drawn and towards what it shrinks: few requests, short prompts, no feature, no plan,
a pool with room. Knows engines by their adapters' declarations only.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from hypothesis import reject
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from preempt_harness.adapters import protocol
from preempt_harness.adapters.protocol import EngineAdapter, EngineSettings
from preempt_harness.admission import AdmissionModel
from preempt_harness.budget import KVBudget, NoPreemptingBudgetError
from preempt_harness.generators import (
    FEATURES,
    FIRST_ORDINARY_ID,
    PromptShape,
    check_features,
    in_order_of_arrival,
    shape_prompt,
)
from preempt_harness.plan import (
    MODES,
    Abort,
    Action,
    Anchor,
    BlockBoundary,
    Chunk,
    ComputedTokens,
    Every,
    Mode,
    OutputTokens,
    Preempt,
    PreemptAll,
    PreemptionPlan,
    RandomPreempt,
    Resume,
    Squeeze,
    Step,
)
from preempt_harness.trial import Trial
from preempt_harness.workload import Operation, RequestSpec, SamplingSpec, Workload

__all__ = ["budgets", "engine_settings", "features", "plans", "trials", "workloads"]

_ALL_PLAN_CAPABILITIES = frozenset(
    {protocol.STEPPED, protocol.PREEMPT, protocol.HOLD_BLOCKS, protocol.ABORT, protocol.RECOMPUTE}
)


def features() -> SearchStrategy[frozenset[str]]:
    """Sets of workload features; each is left out as often as not (swarm testing)."""
    return st.lists(st.booleans(), min_size=len(FEATURES), max_size=len(FEATURES)).map(
        lambda flags: frozenset(name for name, flag in zip(FEATURES, flags, strict=True) if flag)
    )


@st.composite
def workloads(
    draw: DrawFn,
    *,
    vocab_size: int,
    block_size: int,
    max_requests: int = 5,
    max_blocks: int = 3,
    max_tokens: int = 24,
    use_features: Iterable[str] | None = None,
) -> Workload:
    """Workloads of aimed requests.

    Args:
        vocab_size, block_size: of the model and the pool.
        max_requests: most requests.
        max_blocks: longest prompt in blocks; "long_prompts" triples it.
        max_tokens: longest output.
        use_features: of `generators.FEATURES`; None draws them.
    """
    chosen = draw(features()) if use_features is None else check_features(use_features)
    seed = draw(st.integers(0, 2**16))
    if "long_prompts" in chosen:
        max_blocks *= 3
    count = draw(st.integers(1, max_requests))
    requests = [
        RequestSpec(
            id=f"r{index}",
            prompt_token_ids=shape_prompt(
                draw(_shapes(block_size, max_blocks, chosen)),
                vocab_size=vocab_size,
                block_size=block_size,
                seed=seed,
                index=index,
            ),
            sampling=draw(_samplings(vocab_size, max_tokens, chosen)),
            arrival_step=draw(st.integers(0, max_tokens)) if "late_arrivals" in chosen else 0,
        )
        for index in range(count)
    ]
    operations = draw(_operations(count, max_tokens)) if "operations" in chosen else []
    return Workload(requests=in_order_of_arrival(requests), operations=operations)


@st.composite
def _shapes(draw: DrawFn, block_size: int, max_blocks: int, chosen: frozenset[str]) -> PromptShape:
    blocks = draw(st.integers(0, max_blocks))
    offset = draw(st.sampled_from((0, 1, -1)) | st.integers(0, block_size - 1))
    num_tokens = max(1, blocks * block_size + offset)
    if "shared_prefix" not in chosen:
        return PromptShape(num_tokens=num_tokens)
    return PromptShape(
        num_tokens=num_tokens,
        num_shared_tokens=draw(st.sampled_from((0, num_tokens, num_tokens // 2))),
        group=draw(st.integers(0, 1)),
        own_first_block="equal_later_blocks" in chosen and draw(st.booleans()),
    )


@st.composite
def _samplings(
    draw: DrawFn, vocab_size: int, max_tokens: int, chosen: frozenset[str]
) -> SamplingSpec:
    length = draw(st.integers(1, max_tokens))
    sampled = "sampling" in chosen and draw(st.booleans())
    stops = "stops" in chosen and draw(st.booleans())
    token_ids = st.integers(FIRST_ORDINARY_ID, vocab_size - 1)
    return SamplingSpec(
        max_tokens=length,
        temperature=draw(st.sampled_from((1.0, 0.7))) if sampled else 0.0,
        seed=draw(st.none() | st.integers(0, 2**16)) if sampled else None,
        stop_token_ids=(draw(token_ids),) if stops else (),
        min_tokens=draw(st.integers(0, length)) if stops else 0,
    )


@st.composite
def _operations(draw: DrawFn, num_requests: int, max_tokens: int) -> list[Operation]:
    steps = st.integers(1, 2 * max_tokens)
    operations = []
    if draw(st.booleans()):
        request = f"r{draw(st.integers(0, num_requests - 1))}"
        operations.append(Operation(kind="abort", step=draw(steps), request=request))
    if draw(st.booleans()):
        operations.append(Operation(kind="reset_prefix_cache", step=draw(steps)))
    return operations


@st.composite
def budgets(
    draw: DrawFn, workload: Workload, admission: AdmissionModel, *, preempting: bool = False
) -> KVBudget:
    """Budgets in which every request can finish, from one that never preempts downwards.

    Args:
        workload, admission: what the budget is for.
        preempting: only the tight budget; rejects workloads that have none.
    """
    if preempting:
        try:
            return KVBudget.tight(workload, admission)
        except NoPreemptingBudgetError:
            reject()
    room = KVBudget.roomy(workload, admission)
    taken = draw(st.integers(0, room.num_blocks - room.num_blocks_min))
    return KVBudget.solve(workload, admission, room.num_blocks - taken)


@st.composite
def plans(
    draw: DrawFn,
    workload: Workload,
    *,
    block_size: int,
    max_actions: int = 3,
    capabilities: frozenset[str] = _ALL_PLAN_CAPABILITIES,
) -> PreemptionPlan:
    """Plans that suit the workload, the empty one first.

    Args:
        workload: what will run.
        block_size: for block boundaries.
        max_actions: most actions.
        capabilities: of the engine; actions that need others are left out.
    """
    stepped = protocol.STEPPED in capabilities
    modes: list[Mode] = [mode for mode in MODES if mode in capabilities]
    anchored = _anchored(workload, block_size, stepped=stepped)
    kinds: list[SearchStrategy[Action]] = []
    if protocol.PREEMPT in capabilities and modes:
        mode = st.sampled_from(modes)
        kinds.append(st.builds(_preempt, anchored, mode))
        kinds.append(st.builds(_preempt_all, anchored, mode))
        if stepped:
            kinds.append(_random_preempts(mode))
            kinds.append(_everies(workload, mode))
    if protocol.HOLD_BLOCKS in capabilities and stepped:
        kinds.append(_squeezes(workload))
    if protocol.ABORT in capabilities:
        kinds.append(anchored.map(lambda pair: Abort(*pair)))
    if not kinds:
        return PreemptionPlan()
    return PreemptionPlan(draw(st.lists(st.one_of(kinds), max_size=max_actions)))


def _horizon(workload: Workload) -> int:
    """A step by which an unhindered workload is about done."""
    return max(request.arrival_step + request.sampling.max_tokens for request in workload.requests)


@st.composite
def _anchored(
    draw: DrawFn, workload: Workload, block_size: int, *, stepped: bool
) -> tuple[str, Anchor]:
    """A request and an anchor at which it may run."""
    request = draw(st.sampled_from(workload.requests))
    outputs = request.sampling.max_tokens
    computed = request.num_prompt_tokens + outputs - 2
    kinds: list[SearchStrategy[Anchor]] = []
    if outputs >= 2:
        kinds.append(st.integers(1, outputs - 1).map(OutputTokens))
    if stepped:
        kinds.append(st.integers(0, _horizon(workload)).map(Step))
        kinds.append(st.integers(1, 2).map(Resume))
        if computed >= 1:
            kinds.append(st.integers(1, computed).map(ComputedTokens))
            kinds.append(st.integers(1, min(3, computed)).map(Chunk))
        if computed > block_size:
            blocks = st.integers(1, (computed - 1) // block_size)
            offsets = st.sampled_from((0, 1, -1) if block_size > 1 else (0, 1))
            kinds.append(st.builds(BlockBoundary, blocks, offsets))
    if not kinds:  # its only output token ends it, and nothing else is seen of this engine
        reject()
    return request.id, draw(st.one_of(kinds))


def _preempt(target: tuple[str, Anchor], mode: Mode) -> Action:
    return Preempt(*target, mode)


def _preempt_all(target: tuple[str, Anchor], mode: Mode) -> Action:
    return PreemptAll(target[1], mode)


@st.composite
def _squeezes(draw: DrawFn, workload: Workload) -> Action:
    start = draw(st.integers(0, _horizon(workload)))
    length = draw(st.integers(1, 8))
    return Squeeze(draw(st.integers(1, 8) | st.just("all")), start, start + length)


@st.composite
def _random_preempts(draw: DrawFn, mode: SearchStrategy[Mode]) -> Action:
    probability = draw(st.sampled_from((0.05, 0.2, 0.5)))
    seed = draw(st.integers(0, 2**16))
    return RandomPreempt(probability, draw(st.integers(1, 5)), seed, draw(mode))


@st.composite
def _everies(draw: DrawFn, workload: Workload, mode: SearchStrategy[Mode]) -> Action:
    names = ["", *(request.id for request in workload.requests)]
    steps, count = draw(st.integers(1, 8)), draw(st.integers(1, 5))
    return Every(steps, count, draw(st.sampled_from(names)), draw(mode))


@st.composite
def engine_settings(
    draw: DrawFn,
    *,
    model: str = "exact",
    num_blocks: int = 1,
    block_sizes: Iterable[int] = (),
    use_watermark: bool = True,
) -> EngineSettings:
    """Settings of an engine, the plainest first.

    Args:
        model: name of the model.
        num_blocks: of the pool; replace it once the budget is known.
        block_sizes: to choose from; by default 4, 1, 2, 3, 8 and 16.
        use_watermark: draw watermarks too.
    """
    watermarks = (0.0, 0.01, 0.1) if use_watermark else (0.0,)
    return EngineSettings(
        model=model,
        num_blocks=num_blocks,
        block_size=draw(st.sampled_from(tuple(block_sizes) or (4, 1, 2, 3, 8, 16))),
        max_num_batched_tokens=draw(st.sampled_from((2048, 64, 16, 7))),
        max_num_seqs=draw(st.sampled_from((256, 4, 2, 1))),
        watermark=draw(st.sampled_from(watermarks)),
        enable_prefix_caching=draw(st.booleans()),
    )


@st.composite
def trials(
    draw: DrawFn,
    adapter: EngineAdapter,
    *,
    vocab_size: int,
    model: str = "exact",
    use_features: Iterable[str] | None = None,
    max_actions: int = 3,
) -> Trial:
    """Whole trials for an engine: settings, workload, budget and plan that suit each other.

    Args:
        adapter: of the engine; says what it can do and how it admits.
        vocab_size: of the model.
        model: its name.
        use_features: of `generators.FEATURES`; None draws them.
        max_actions: most actions of the plan.
    """
    settings = draw(engine_settings(model=model, block_sizes=adapter.block_sizes))
    workload = draw(
        workloads(vocab_size=vocab_size, block_size=settings.block_size, use_features=use_features)
    )
    budget = draw(budgets(workload, adapter.admission_model(settings)))
    plan = draw(
        plans(
            workload,
            block_size=settings.block_size,
            max_actions=max_actions,
            capabilities=adapter.capabilities,
        )
    )
    return Trial(
        engine=adapter.name,
        settings=msgspec.structs.replace(settings, num_blocks=budget.num_blocks),
        workload=workload,
        plan=plan.encode(),
        budget=budget.to_builtins(),
    )
