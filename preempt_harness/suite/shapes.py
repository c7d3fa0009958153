"""Requests in terms of blocks: what the scenarios of the suite are made of."""

from __future__ import annotations

from typing import Any

import pytest

from preempt_harness.adapters import protocol
from preempt_harness.harness import PreemptHarness
from preempt_harness.workload import RequestSpec, SamplingSpec, Workload

BLOCK = 4  # where an engine leaves the choice; small, so that few tokens cross many boundaries


def block_size(preempt: PreemptHarness) -> int:
    """The suite's block size on this engine: a marker's or the matrix's, 4, or its smallest."""
    if "block_size" in preempt.defaults:
        return int(preempt.defaults["block_size"])
    sizes = preempt.adapter.block_sizes
    return min(sizes) if sizes else BLOCK


def request(
    preempt: PreemptHarness,
    name: str,
    prompt: int | list[int],
    max_tokens: int,
    *,
    arrival_step: int = 0,
    **sampling: Any,
) -> RequestSpec:
    """A request with a fresh prompt of so many tokens, or with these tokens."""
    token_ids = preempt.prompts.take(prompt) if isinstance(prompt, int) else prompt
    return RequestSpec(
        id=name,
        prompt_token_ids=token_ids,
        sampling=SamplingSpec(max_tokens=max_tokens, **sampling),
        arrival_step=arrival_step,
        text=preempt.prompts.text_of(token_ids),
    )


def require_mode(preempt: PreemptHarness, mode: str) -> None:
    """Skip where the engine does not preempt in this way."""
    if mode not in preempt.adapter.capabilities:
        pytest.skip(f"engine {preempt.adapter.name} lacks {mode}")


def drawn(preempt: PreemptHarness, seed: int) -> dict[str, Any]:
    """Parameters by which branches differ; where the engine cannot sample, all are the same."""
    if "sampling" not in preempt.adapter.capabilities:
        return {}
    return {"temperature": 1.0, "seed": seed}


def chunks(preempt: PreemptHarness, num_tokens: int) -> dict[str, Any]:
    """Settings with which a step computes so many tokens; none where prompts are never cut."""
    if protocol.CHUNKED_PREFILL not in preempt.adapter.capabilities:
        return {}
    return {"max_num_batched_tokens": num_tokens}


def require_chunks(preempt: PreemptHarness) -> None:
    """Skip where the engine computes a prompt in one step, or not at all."""
    if protocol.CHUNKED_PREFILL not in preempt.adapter.capabilities:
        pytest.skip(f"engine {preempt.adapter.name} lacks {protocol.CHUNKED_PREFILL}")


_NEEDED_BY = {
    "block_reuse_order": protocol.BLOCK_REUSE_ORDER,
    "poison": protocol.POISON,
    "debug_worker_state": protocol.STATE_CHECK,
    "preemption_mode": protocol.SWAP,  # an engine of one mode has no switch
}


def options(preempt: PreemptHarness, **wanted: Any) -> dict[str, Any]:
    """Options that make a trial sharper where the engine has them, and are left out elsewhere."""
    able = preempt.adapter.capabilities
    return {name: value for name, value in wanted.items() if _NEEDED_BY[name] in able}


def companions(preempt: PreemptHarness, block: int, *, count: int = 2) -> list[RequestSpec]:
    """Requests c0, c1, ... that run beside the one a scenario is about."""
    return [request(preempt, f"c{index}", 2 * block + index, 4 * block) for index in range(count)]


def together(*requests: RequestSpec | list[RequestSpec]) -> Workload:
    """One workload of requests and lists of requests."""
    flat: list[RequestSpec] = []
    for item in requests:
        flat += item if isinstance(item, list) else [item]
    return Workload(requests=flat)
