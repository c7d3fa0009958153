"""Anchors and actions of a preemption plan: what to do, and when. Plain data, no engine.

An anchor is a moment in a trial. `Step` is the number of a step; every other anchor is progress of
one request, reached in the first step before which the request runs and has come so far.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from preempt_harness.errors import HarnessError

Mode = Literal["recompute", "swap"]
MODES: tuple[Mode, ...] = ("recompute", "swap")
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.-]+")


class PlanError(HarnessError, ValueError):
    """A plan, or its string form, is wrong."""


# Anchors ------------------------------------------------------------------------------------------


class Step(msgspec.Struct, frozen=True):
    """Before step `number`, exactly. For engines that can be stepped."""

    number: int

    def __post_init__(self) -> None:
        _at_least(self.number, 0, "Step", "number")


class OutputTokens(msgspec.Struct, frozen=True):
    """The request has `count` output tokens. Known of every engine."""

    count: int

    def __post_init__(self) -> None:
        _at_least(self.count, 1, "OutputTokens", "count")


class ComputedTokens(msgspec.Struct, frozen=True):
    """At least `count` tokens of the request have their KV in the cache: also within prefill."""

    count: int

    def __post_init__(self) -> None:
        _at_least(self.count, 1, "ComputedTokens", "count")


class Chunk(msgspec.Struct, frozen=True):
    """`count` chunks of the request's present prefill are done; a re-prefill counts anew."""

    count: int

    def __post_init__(self) -> None:
        _at_least(self.count, 1, "Chunk", "count")


class Resume(msgspec.Struct, frozen=True):
    """The request runs again after its `count`-th preemption; fires before its next step."""

    count: int

    def __post_init__(self) -> None:
        _at_least(self.count, 1, "Resume", "count")


class BlockBoundary(msgspec.Struct, frozen=True):
    """`block` full blocks plus `offset` tokens are computed: `ComputedTokens`, in blocks."""

    block: int
    offset: int = 0

    def __post_init__(self) -> None:
        _at_least(self.block, 1, "BlockBoundary", "block")

    def resolve(self, block_size: int) -> ComputedTokens:
        """The same moment for a block size.

        Raises:
            PlanError: the offset leads before the first token.
        """
        count = self.block * block_size + self.offset
        if count < 1:
            raise PlanError(
                f"BlockBoundary({self.block}, {self.offset}) lies before the first token when a "
                f"block holds {block_size}.",
                "Use a later block or a smaller offset.",
            )
        return ComputedTokens(count)


Anchor = Step | OutputTokens | ComputedTokens | Chunk | Resume | BlockBoundary


# Actions ------------------------------------------------------------------------------------------


class Preempt(msgspec.Struct, frozen=True):
    """Preempt a request at an anchor."""

    request: str
    at: Anchor
    mode: Mode = "recompute"

    def __post_init__(self) -> None:
        _check_request(self.request)
        _check_mode(self.mode)


class PreemptAll(msgspec.Struct, frozen=True):
    """Preempt all that runs, at a step or as soon as any running request is at the anchor."""

    at: Anchor
    mode: Mode = "recompute"

    def __post_init__(self) -> None:
        _check_mode(self.mode)


class Squeeze(msgspec.Struct, frozen=True):
    """Hold `blocks` free blocks hostage from step `start` until step `stop`, which has them back.

    So the engine's own way out of an empty pool runs. "all" holds every block that is free at
    `start`. Several squeezes at once add up.
    """

    blocks: int | Literal["all"]
    start: int
    stop: int

    def __post_init__(self) -> None:
        if self.blocks != "all":
            _at_least(self.blocks, 1, "Squeeze", "blocks")
        _at_least(self.start, 0, "Squeeze", "start")
        if self.stop <= self.start:
            raise PlanError(
                f"Squeeze(start={self.start}, stop={self.stop}) lasts no step.",
                "stop is the first step after it, and must be greater than start.",
            )


class Abort(msgspec.Struct, frozen=True):
    """Abort a request at an anchor."""

    request: str
    at: Anchor

    def __post_init__(self) -> None:
        _check_request(self.request)


class RandomPreempt(msgspec.Struct, frozen=True):
    """Before every step preempt each running request with `probability`, `max_count` times in all.

    A draw depends on the seed, the step and the request only, so that taking away one request
    leaves the draws of the others as they were.
    """

    probability: float
    max_count: int
    seed: int
    mode: Mode = "recompute"

    def __post_init__(self) -> None:
        if not 0 < self.probability <= 1:
            raise PlanError(
                f"RandomPreempt(probability={self.probability!r}) is not in (0, 1].",
                "Choose a share of the steps, such as 0.1.",
            )
        _at_least(self.max_count, 1, "RandomPreempt", "max_count")
        _at_least(self.seed, 0, "RandomPreempt", "seed")
        _check_mode(self.mode)


class Every(msgspec.Struct, frozen=True):
    """Before steps n, 2n, ... preempt `request`, by default the youngest that runs.

    Attributes:
        steps: n.
        max_count: preemptions in all; without an end, the request might never finish.
        request: whom; "" is whichever running request arrived last.
        mode: how.
    """

    steps: int
    max_count: int = 8
    request: str = ""
    mode: Mode = "recompute"

    def __post_init__(self) -> None:
        _at_least(self.steps, 1, "Every", "steps")
        _at_least(self.max_count, 1, "Every", "max_count")
        if self.request:
            _check_request(self.request)
        _check_mode(self.mode)


Action = Preempt | PreemptAll | Squeeze | Abort | RandomPreempt | Every


def anchor_of(action: Action) -> Anchor | None:
    """The moment an action waits for, if it waits for one."""
    return action.at if isinstance(action, Preempt | PreemptAll | Abort) else None


def _at_least(value: int, low: int, owner: str, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise PlanError(f"{owner}({name}={value!r}) is out of range.", f"Give {low} or more.")


def _check_request(request: str) -> None:
    if not _REQUEST_ID.fullmatch(request):
        raise PlanError(
            f"A plan cannot name request {request!r}.",
            "Use letters, digits, '_', '.' and '-' in request ids, such as 'r0'.",
        )


def _check_mode(mode: str) -> None:
    if mode not in MODES:
        raise PlanError(f"Preemption mode {mode!r} is unknown.", f"Use {' or '.join(MODES)}.")
