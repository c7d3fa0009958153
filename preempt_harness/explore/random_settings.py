"""Settings from a seed that suit an engine: what it is capable of, and does not refuse."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec

from preempt_harness.adapters import protocol
from preempt_harness.adapters.protocol import EngineAdapter, EngineSettings

_BLOCK_SIZES = (1, 2, 3, 4, 4, 4, 8, 16)
_TOKEN_BUDGETS = (3, 7, 16, 64, 2048)
_ANY_PROMPT = 1 << 16  # tokens; more than any drawn request has
_PARALLEL = 0.03  # share of trials on several ranks, whose processes are slow to start
_INLINE = 0.12  # share of those whose ranks are in the engine's own process
_NUM_RANKS = (2, 2, 3)
_SMALL_SWAP_SPACE = 6  # blocks
_CALLED = 0.06  # share of trials in which a call of the engine runs the steps
_SPECULATIVE = 0.25  # share of trials in which tokens are drafted
_AHEAD = 0.25  # share of the others in which steps are decided ahead
_WATERMARKS = (0.0, 0.0, 0.0, 0.05, 0.3)


def random_settings(source: random.Random, adapter: EngineAdapter, model: str) -> EngineSettings:
    """Settings of which the engine can do everything; the block count is left at 1."""
    able = adapter.capabilities
    options: dict[str, Any] = {}
    if protocol.BLOCK_REUSE_ORDER in able:
        options["block_reuse_order"] = source.choice(("fifo", "lifo", "random"))
    if protocol.POISON in able:
        options["poison"] = source.random() < 0.5
    if protocol.STATE_CHECK in able:
        options["debug_worker_state"] = source.random() < 0.5
    if protocol.SWAP in able and source.random() < 0.3:
        options["preemption_mode"] = "swap"
        if source.random() < 0.5:
            options["swap_space_blocks"] = source.randint(0, _SMALL_SWAP_SPACE)
    settings = EngineSettings(
        model=model,
        num_blocks=1,
        block_size=source.choice(adapter.block_sizes or _BLOCK_SIZES),
        max_num_batched_tokens=(
            source.choice(_TOKEN_BUDGETS) if protocol.CHUNKED_PREFILL in able else _ANY_PROMPT
        ),
        max_num_seqs=source.choice((1, 2, 4, 256)),
        watermark=source.choice(_WATERMARKS) if protocol.WATERMARK in able else 0.0,
        enable_prefix_caching=protocol.PREFIX_CACHING in able and source.random() < 0.6,
        options=options,
    )
    return _with_ranks(source, settings, adapter)


def _with_ranks(
    source: random.Random, settings: EngineSettings, adapter: EngineAdapter
) -> EngineSettings:
    """The settings, sometimes with several ranks: of the exact model, which needs no devices."""
    if protocol.TENSOR_PARALLEL not in adapter.capabilities or settings.model != "exact":
        return settings
    share = source.random()
    if share < _PARALLEL:
        return msgspec.structs.replace(settings, tensor_parallel_size=2)
    if protocol.INLINE_RANKS not in adapter.capabilities or share >= _PARALLEL + _INLINE:
        return settings
    return msgspec.structs.replace(
        settings,
        tensor_parallel_size=source.choice(_NUM_RANKS),
        options={**settings.options, "worker_processes": False},
    )


def with_drafts(
    source: random.Random, settings: EngineSettings, adapter: EngineAdapter
) -> EngineSettings:
    """The settings, sometimes with tokens drafted ahead."""
    if protocol.SPECULATION not in adapter.capabilities or source.random() >= _SPECULATIVE:
        return settings
    return drafted(source, settings, adapter)


def drafted(
    source: random.Random,
    settings: EngineSettings,
    adapter: EngineAdapter,
    *,
    methods: Sequence[str] = ("ngram", "draft_model", "scripted"),
    counts: Sequence[int] = (1, 2, 3, 5),
    rates: Sequence[float] = (0.0, 0.5, 0.9, 1.0, 1.0),
) -> EngineSettings:
    """The settings with tokens drafted ahead, if the engine can.

    For the exact model its own drafts, and those of a script, of which a given share is right;
    for any model a method that finds drafts in the text.

    Args:
        source: of the draws.
        settings, adapter: of the engine.
        methods: to draw from, for the exact model.
        counts: most drafts at once, to draw from.
        rates: shares of right drafts to draw from.
    """
    if protocol.SPECULATION not in adapter.capabilities:
        return settings
    ahead = settings.async_scheduling
    known = methods if settings.model == "exact" else ("ngram",)
    able = [name for name in known if takes(adapter, settings, _drafts_by(name), ahead)]
    if not able:
        return settings
    method = source.choice(able)
    drafts = _drafts_by(method, source.choice(counts))
    if method == "draft_model":
        drafts["model"] = settings.model
    if method != "ngram":
        drafts["acceptance_rate"] = source.choice(rates)
    return msgspec.structs.replace(settings, speculative_config=drafts)


def _drafts_by(method: str, count: int = 1) -> dict[str, Any]:
    return {"method": method, "num_speculative_tokens": count}


def takes(
    adapter: EngineAdapter, settings: EngineSettings, drafts: dict[str, Any] | None, ahead: int = 0
) -> bool:
    """Whether the engine is not known to refuse such drafts, and so many steps ahead."""
    wanted = msgspec.structs.replace(settings, speculative_config=drafts, async_scheduling=ahead)
    return protocol.refusal_of(adapter, wanted) is None


def with_steps_ahead(
    source: random.Random, settings: EngineSettings, adapter: EngineAdapter
) -> EngineSettings:
    """The settings, sometimes with steps decided ahead, where that goes with their drafts."""
    able = protocol.ASYNC_SCHEDULING in adapter.capabilities
    if not able or source.random() >= _AHEAD:
        return settings
    drafts = settings.speculative_config
    depths = [depth for depth in (1, 2) if takes(adapter, settings, drafts, depth)]
    if not depths:
        return settings
    return msgspec.structs.replace(settings, async_scheduling=source.choice(depths))


def predictable(settings: EngineSettings) -> EngineSettings:
    """The settings without what an admission model does not play."""
    options = {
        name: value
        for name, value in settings.options.items()
        if name not in ("preemption_mode", "swap_space_blocks")
    }
    return msgspec.structs.replace(
        settings, speculative_config=None, async_scheduling=0, options=options
    )


def with_call(
    source: random.Random, settings: EngineSettings, adapter: EngineAdapter
) -> EngineSettings:
    """In some trials a call of the engine runs the steps, if it can.

    Not where few may wait: a batch then arrives one by one, in an order that hangs on the pool.
    """
    able = protocol.OWN_LOOP in adapter.capabilities and settings.max_waiting_requests is None
    if not able or "call" in settings.options or source.random() >= _CALLED:
        return settings
    options = {**settings.options, "call": source.choice(("generate", "stream"))}
    return msgspec.structs.replace(settings, options=options)
