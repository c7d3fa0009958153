"""Workloads whose outputs are known beforehand: prompts that go on behind them, limits within them.

Seeded, plain data, no engine: who calls gives the outputs. What is drawn stands at the ends of
blocks, one token beside them, or at any other place of an output.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from preempt_harness.generators import in_order_of_arrival, likely_steps
from preempt_harness.workload import RequestSpec, SamplingSpec, Workload

_MAX_FOLLOWERS = 3
_BEYOND = 6
"""Tokens by which `max_tokens` may lie behind a stop: as many as drafts may."""


def is_plain(sampling: SamplingSpec) -> bool:
    """Whether an output is nothing but the model's likeliest tokens, until it ends."""
    return sampling.temperature == 0 and not sampling.changes_logits


def with_continuation(
    source: random.Random, workload: Workload, *, text: Sequence[int], of: int, block_size: int
) -> Workload:
    """Another request's prompt becomes what one request's text will be.

    A prefix cache may then find blocks that hold outputs. The prompt is cut at a block boundary of
    the outputs, or one token beside it, and goes on with a token of its own or not. Often the
    output itself ends at that boundary, so that its last token was never computed.

    Args:
        source: of the draws.
        workload: of two requests or more.
        text: prompt and outputs of the request whose text it is.
        of: its index; the shorter its output, the same it begins with.
        block_size: of the pool.
    """
    first = workload.requests[of]
    other = source.choice([index for index in range(len(workload.requests)) if index != of])
    boundaries = range(
        (first.num_prompt_tokens // block_size + 1) * block_size, len(text) + 1, block_size
    )
    end = source.choice([*boundaries, len(text)])
    requests = list(workload.requests)
    if boundaries and source.random() < 0.5:
        end = source.choice(boundaries)
        sampling = replace(first.sampling, max_tokens=end - first.num_prompt_tokens, min_tokens=0)
        requests[of] = replace(first, sampling=sampling)
    prompt = [*text[: max(1, end + source.choice((0, 0, 1, -1)))]]
    if source.random() < 0.5:
        prompt.append(requests[other].prompt_token_ids[0])
    length = likely_steps(first.num_prompt_tokens, len(text) - first.num_prompt_tokens)
    requests[other] = replace(
        requests[other],
        prompt_token_ids=prompt,
        arrival_step=first.arrival_step + source.randint(1, 2 * length),
    )
    return replace(workload, requests=in_order_of_arrival(requests))


def with_followers(
    source: random.Random, workload: Workload, *, text: Sequence[int], of: int, block_size: int
) -> Workload:
    """One request ends with a block; others begin with its text, up to there or to other blocks.

    It ends by its length, or by a stop token behind which more was allowed. The others come while
    it runs or when it has ended. They begin with its text up to the end of a block of outputs, or
    one token beside it, and go on with tokens of their own or not at all.

    Args:
        source: of the draws.
        workload: of two requests or more.
        text: prompt and likeliest outputs of the request whose text it is, at least to the end of
            one block behind the prompt.
        of: its index; its parameters become plain.
        block_size: of the pool.
    """
    leader = workload.requests[of]
    first = (leader.num_prompt_tokens // block_size + 1) * block_size
    boundaries = range(first, len(text) + 1, block_size)
    end = source.choice(boundaries)
    output = text[leader.num_prompt_tokens : end]
    length = likely_steps(leader.num_prompt_tokens, len(text) - leader.num_prompt_tokens)
    requests = [replace(leader, sampling=_ending(source, output))]
    others = [request for index, request in enumerate(workload.requests) if index != of]
    count = source.randint(1, min(_MAX_FOLLOWERS, len(others)))
    for request in others[:count]:
        place = source.choice((end, end, source.choice(boundaries))) + source.choice((-1, 0, 0, 1))
        later = source.randint(1, 2 * length)
        if source.random() < 0.5:  # about when it ends
            later = len(output) + source.randint(0, 4)
        own = request.prompt_token_ids[: source.choice((0, 1, 1, block_size))]
        requests.append(
            replace(
                request,
                prompt_token_ids=[*text[:place], *own],
                arrival_step=leader.arrival_step + later,
            )
        )
    return replace(workload, requests=in_order_of_arrival([*requests, *others[count:]]))


def _ending(source: random.Random, output: Sequence[int]) -> SamplingSpec:
    """Plain parameters with which that is the whole output."""
    if source.random() < 0.6 and output[-1] not in output[:-1]:
        more = source.randint(1, _BEYOND)
        return SamplingSpec(max_tokens=len(output) + more, stop_token_ids=(output[-1],))
    return SamplingSpec(max_tokens=len(output))


def with_limits(
    source: random.Random,
    workload: Workload,
    *,
    outputs: Mapping[int, Sequence[int]],
    block_size: int,
) -> Workload:
    """What ends outputs, or may not end them yet, lies within them, and close together.

    A token becomes a stop where it first comes; `min_tokens` allows that just so, forbids it just
    so, or is far from it; `max_tokens` is right there too, or far.

    Args:
        source: of the draws.
        workload: whose requests are to be changed.
        outputs: index of a request with plain parameters -> its likeliest tokens.
        block_size: of the pool; places at the end of a block are preferred.
    """
    requests = list(workload.requests)
    for index, output in outputs.items():
        request = requests[index]
        places = [at for at in range(1, len(output)) if output[at] not in output[:at]]
        if places:
            place = _preferred(source, places, request, block_size)
            limits = _limits_at(source, request.sampling, output, place)
            requests[index] = replace(request, sampling=limits)
    return replace(workload, requests=requests)


def _preferred(
    source: random.Random, places: Sequence[int], request: RequestSpec, block_size: int
) -> int:
    """One of the places; half of the time one whose token is the last of a block, if any is."""
    ends = [at for at in places if (request.num_prompt_tokens + at + 1) % block_size == 0]
    return source.choice(ends if ends and source.random() < 0.5 else places)


def _limits_at(
    source: random.Random, sampling: SamplingSpec, output: Sequence[int], place: int
) -> SamplingSpec:
    most = source.choice((place, place + 1, place + 2, len(output), len(output)))
    least = source.choice((0, place - 1, place, place, place + 1))
    return replace(
        sampling,
        max_tokens=most,
        min_tokens=min(least, most),
        stop_token_ids=(output[place],),
    )
