"""Workloads that aim at the places where preemption goes wrong. Seeded, plain data, no engine.

Every generator is a function of its arguments: the same seed gives the same workload. Requests are
called r0, r1, ... in order of arrival; a docstring says which of them plays which part. Token ids
are drawn from [4, vocab_size), since lower ids are often special.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from preempt_harness.errors import HarnessError
from preempt_harness.processors import PROCESSORS
from preempt_harness.workload import BeamSpec, Operation, RequestSpec, SamplingSpec, Workload

FIRST_ORDINARY_ID = 4
_LEAST_ORDINARY_IDS = 4
_PRIORITIES = 3
_MOST_CHUNKS = 32  # of a prompt
MAX_BRANCHES = 3
"""Most sequences of one request that are drawn."""

FEATURES = (
    "shared_prefix",  # prompts begin alike
    "equal_later_blocks",  # of those, some have another first block
    "late_arrivals",
    "sampling",  # temperature and seeds
    "stops",  # stop token ids
    "operations",  # aborts and cache resets
    "long_prompts",
    "shifted_prefix",  # prompts begin with a later block of others
    "logprobs",
    "outputs",  # several of one prompt (n)
    "beams",  # beam search
    "penalties",  # and biases
    "processors",  # logits processors with state
    "prompt_logprobs",
    "priorities",
    "running_resets",  # preempt all that run, and forget cached content
)

LATER_FEATURES = (
    "second_batch",  # half of the requests arrive when the others have long ended
    "few_tokens",  # outputs of no token, or of one
    "bad_words",  # few ids are likely, and some of them may not follow others
    "stop_strings",  # likewise, and some of them one after another are a stop
    "grammars",  # regular expressions
    "eos",  # end-of-sequence may end a request
)
"""Features that change a workload when it is drawn, each by draws of its own."""


class GeneratorError(HarnessError, ValueError):
    """A generator is asked for a workload that cannot be."""


class PromptShape(msgspec.Struct, frozen=True, kw_only=True):
    """What matters of a prompt: its length, and what of it others have too.

    Attributes:
        num_tokens: its length.
        num_shared_tokens: so many of its first tokens come from its group's text.
        group: prompts of one group share that text.
        own_first_block: its first block is its own all the same, so that its later blocks equal
            those of others under different first blocks.
        shift_blocks: its shared text begins so many blocks later in the group's text, so that it
            begins with what is a later block of others.
    """

    num_tokens: int
    num_shared_tokens: int = 0
    group: int = 0
    own_first_block: bool = False
    shift_blocks: int = 0


def random_tokens(vocab_size: int, name: str, num_tokens: int) -> list[int]:
    """Ordinary token ids; a function of `name`, and of two counts one is the other's beginning.

    Raises:
        GeneratorError: the vocabulary is too small.
    """
    if vocab_size < FIRST_ORDINARY_ID + _LEAST_ORDINARY_IDS:
        raise GeneratorError(
            f"vocab_size={vocab_size} leaves too few ordinary ids.",
            f"Use {FIRST_ORDINARY_ID + _LEAST_ORDINARY_IDS} or more.",
        )
    source = random.Random(name)
    return [source.randrange(FIRST_ORDINARY_ID, vocab_size) for _ in range(num_tokens)]


def shape_prompt(
    shape: PromptShape, *, vocab_size: int, block_size: int, seed: int | str, index: int
) -> list[int]:
    """Token ids of a prompt.

    Args:
        shape: length and sharing.
        vocab_size, block_size: of the model and the pool.
        seed: of the workload.
        index: tells apart what is the prompt's own.
    """
    skipped = shape.shift_blocks * block_size
    text = random_tokens(
        vocab_size, f"{seed}/group/{shape.group}", skipped + shape.num_shared_tokens
    )[skipped:]
    own = random_tokens(vocab_size, f"{seed}/own/{index}", shape.num_tokens)
    prompt = (text + own)[: shape.num_tokens]
    if shape.own_first_block and text:
        first = own[:block_size]
        if first[0] == text[0]:
            first[0] = _another_id(text[0], vocab_size)
        prompt[: len(first)] = first
    return prompt


def _another_id(token_id: int, vocab_size: int) -> int:
    return token_id + 1 if token_id + 1 < vocab_size else FIRST_ORDINARY_ID


# Aimed workloads ----------------------------------------------------------------------------------


def block_edges(
    *, vocab_size: int, block_size: int, seed: int, blocks: int = 2, max_tokens: int = 16
) -> Workload:
    """Prompts one token short of `blocks` blocks, exactly as long, and one token longer.

    Output lengths differ by one as well, so that ends fall around boundaries too.
    """
    lengths = [max(1, blocks * block_size + offset) for offset in (-1, 0, 1)]
    prompts = [
        random_tokens(vocab_size, f"{seed}/own/{index}", length)
        for index, length in enumerate(lengths)
    ]
    return _workload(prompts, [max_tokens, max_tokens + 1, max_tokens + 2])


def shared_prefix(
    *,
    vocab_size: int,
    block_size: int,
    seed: int,
    requests: int = 3,
    prefix_blocks: int = 2,
    max_tokens: int = 16,
) -> Workload:
    """Prompts that begin with the same full blocks and go on each in its own way.

    r0 is the prefix alone, a prompt of whole blocks: a hit may not cover all of it.
    """
    prefix = prefix_blocks * block_size
    shapes = [
        PromptShape(num_tokens=prefix + index * (block_size // 2 + 1), num_shared_tokens=prefix)
        for index in range(requests)
    ]
    return _workload(_shaped(shapes, vocab_size, block_size, seed), [max_tokens] * requests)


def equal_later_blocks(
    *, vocab_size: int, block_size: int, seed: int, blocks: int = 3, max_tokens: int = 16
) -> Workload:
    """r1 has another first block than r0 and the same later blocks; r2 is r0 again, and later.

    A prefix cache that names a block by its own tokens alone takes one for the other.
    """
    length = blocks * block_size + 1
    shapes = [
        PromptShape(num_tokens=length, num_shared_tokens=length, own_first_block=own)
        for own in (False, True, False)
    ]
    prompts = _shaped(shapes, vocab_size, block_size, seed)
    return _workload(prompts, [max_tokens] * 3, arrivals=[0, 1, 2])


def bystander(
    *,
    vocab_size: int,
    block_size: int,
    seed: int,
    blocks: int = 2,
    max_tokens: int = 24,
    arrival_step: int = 4,
) -> Workload:
    """r1 is the victim; r0 beside it and r2, which arrives later, reuse the blocks it frees.

    r0 and r1 arrive together, so r1 is admitted last and is the one that an engine short of blocks
    preempts. r2 needs as many blocks as r1 had.
    """
    length = blocks * block_size
    prompts = [
        random_tokens(vocab_size, f"{seed}/own/{index}", length + offset)
        for index, offset in enumerate((1, 0, 0))
    ]
    return _workload(prompts, [max_tokens] * 3, arrivals=[0, 0, arrival_step])


def later_sharer(
    *,
    vocab_size: int,
    block_size: int,
    seed: int,
    blocks: int = 2,
    max_tokens: int = 24,
    arrival_step: int = 4,
) -> Workload:
    """r1 is the victim; r2 arrives later and begins with all full blocks of r1's prompt."""
    shared = blocks * block_size
    shapes = [
        PromptShape(num_tokens=shared + 1),
        PromptShape(num_tokens=shared + 1, num_shared_tokens=shared, group=1),
        PromptShape(num_tokens=shared + block_size, num_shared_tokens=shared, group=1),
    ]
    prompts = _shaped(shapes, vocab_size, block_size, seed)
    return _workload(prompts, [max_tokens] * 3, arrivals=[0, 0, arrival_step])


def unequal_lengths(
    *, vocab_size: int, block_size: int, seed: int, requests: int = 4, max_tokens: int = 24
) -> Workload:
    """Long prompts with short outputs beside short prompts with long outputs, in turn."""
    prompts, lengths = [], []
    for index in range(requests):
        is_long = index % 2 == 0
        num_tokens = 3 * block_size + index if is_long else block_size // 2 + index
        prompts.append(random_tokens(vocab_size, f"{seed}/own/{index}", num_tokens))
        lengths.append(max(1, max_tokens // 3) if is_long else max_tokens)
    return _workload(prompts, lengths)


def long_prompt(
    *,
    vocab_size: int,
    seed: int,
    max_num_batched_tokens: int,
    chunks: int = 3,
    max_tokens: int = 16,
) -> Workload:
    """r1's prompt is `chunks` token budgets and one token long; r0 decodes beside it.

    r0 has a prompt of one token, so it takes one token of the budget in every step.
    """
    num_tokens = chunks * max_num_batched_tokens + 1
    prompts = [
        random_tokens(vocab_size, f"{seed}/own/{index}", length)
        for index, length in enumerate((1, num_tokens))
    ]
    return _workload(prompts, [max_tokens + chunks, max_tokens])


# Mixed workloads ----------------------------------------------------------------------------------


def random_workload(
    seed: int | str,
    *,
    vocab_size: int,
    block_size: int,
    max_requests: int = 6,
    max_blocks: int = 3,
    max_tokens: int = 24,
    features: Iterable[str] | None = None,
) -> Workload:
    """A mixture of the aims above.

    Args:
        seed: of everything.
        vocab_size, block_size: of the model and the pool.
        max_requests: most requests.
        max_blocks: longest prompt in blocks; "long_prompts" triples it.
        max_tokens: longest output.
        features: of `FEATURES` and `LATER_FEATURES`; None leaves each of the former out with
            probability one half, so that what one feature hides shows in a workload without it
            (swarm testing: Groce et al., ISSTA 2012).
    """
    source = random.Random(f"{seed}/random")
    chosen = [name for name in FEATURES if source.random() < 0.5] if features is None else features
    wanted = check_features(chosen)
    if "long_prompts" in wanted:
        max_blocks *= 3
    shapes = [
        _random_shape(source, block_size, max_blocks, wanted)
        for _ in range(source.randint(1, max_requests))
    ]
    requests = []
    for index, prompt in enumerate(_shaped(shapes, vocab_size, block_size, seed)):
        late = "late_arrivals" in wanted and source.random() < 0.5
        requests.append(
            RequestSpec(
                id=f"r{index}",
                prompt_token_ids=prompt,
                sampling=_random_sampling(source, vocab_size, max_tokens, wanted),
                arrival_step=source.randint(1, max_tokens) if late else 0,
                priority=source.randrange(_PRIORITIES) if "priorities" in wanted else 0,
            )
        )
    workload = Workload(
        requests=in_order_of_arrival(requests),
        operations=_random_operations(source, len(requests), max_tokens, wanted),
    )
    for name in LATER_FEATURES:
        if name in wanted:
            workload = _LATER[name](random.Random(f"{seed}/{name}"), workload, vocab_size)
    return workload


def check_features(features: Iterable[str]) -> frozenset[str]:
    """The features as a set.

    Raises:
        GeneratorError: one is unknown.
    """
    chosen = frozenset(features)
    known = (*FEATURES, *LATER_FEATURES)
    for name in sorted(chosen - set(known)):
        raise GeneratorError(
            f"Workload feature {name!r} is unknown.", f"Known: {', '.join(known)}."
        )
    return chosen


def likely_steps(num_prompt_tokens: int, num_outputs: int) -> int:
    """Steps that a request may well take: one a token, but a long prompt comes in larger chunks."""
    return min(num_prompt_tokens, _MOST_CHUNKS) + num_outputs


def in_order_of_arrival(requests: Iterable[RequestSpec]) -> list[RequestSpec]:
    """The requests sorted by arrival step and named anew, r0, r1, ..."""
    ordered = sorted(requests, key=lambda request: request.arrival_step)
    return [
        msgspec.structs.replace(request, id=f"r{index}") for index, request in enumerate(ordered)
    ]


def _random_shape(
    source: random.Random, block_size: int, max_blocks: int, features: frozenset[str]
) -> PromptShape:
    blocks = source.randint(0, max_blocks)
    offset = source.choice((-1, 0, 1, source.randrange(block_size)))
    num_tokens = max(1, blocks * block_size + offset)
    if "shared_prefix" not in features or source.random() < 0.3:
        return PromptShape(num_tokens=num_tokens)
    shared = source.choice((num_tokens, num_tokens // block_size * block_size, num_tokens // 2))
    return PromptShape(
        num_tokens=num_tokens,
        num_shared_tokens=shared,
        group=source.randrange(2),
        own_first_block="equal_later_blocks" in features and source.random() < 0.3,
        shift_blocks=source.randrange(2) if "shifted_prefix" in features else 0,
    )


def _random_sampling(
    source: random.Random, vocab_size: int, max_tokens: int, features: frozenset[str]
) -> SamplingSpec:
    sampled = "sampling" in features and source.random() < 0.5
    stops = "stops" in features and source.random() < 0.5
    length = source.randint(1, max_tokens)
    filtered = sampled and source.random() < 0.5
    if "beams" in features and source.random() < 0.3:
        return _random_beams(source, length, vocab_size, stops=stops)
    several = "outputs" in features and source.random() < 0.3
    return SamplingSpec(
        n=source.randint(2, MAX_BRANCHES) if several else 1,
        max_tokens=length,
        temperature=source.choice((0.7, 1.0)) if sampled or several else 0.0,
        top_k=source.choice((0, 2, 8)) if filtered else 0,
        top_p=source.choice((1.0, 0.5)) if filtered else 1.0,
        min_p=source.choice((0.0, 0.1)) if filtered else 0.0,
        seed=source.randrange(2**16) if sampled and source.random() < 0.5 else None,
        stop_token_ids=_random_stops(source, vocab_size) if stops else (),
        min_tokens=source.randint(0, length) if stops and source.random() < 0.5 else 0,
        logprobs=source.choice((None, 0, 2)) if "logprobs" in features else None,
        **_random_state(source, vocab_size, features),
    )


def _random_state(
    source: random.Random, vocab_size: int, features: frozenset[str]
) -> dict[str, Any]:
    """Parameters whose effect depends on everything that came before."""
    drawn: dict[str, Any] = {}
    if "penalties" in features and source.random() < 0.5:
        drawn["repetition_penalty"] = source.choice((1.0, 1.5))
        drawn["presence_penalty"] = source.choice((0.0, 1.0))
        drawn["frequency_penalty"] = source.choice((0.0, 0.7))
        drawn["logit_bias"] = ((source.randrange(FIRST_ORDINARY_ID, vocab_size), 5.0),)
    if "processors" in features and source.random() < 0.5:
        drawn["logits_processors"] = (source.choice(sorted(PROCESSORS)),)
    if "prompt_logprobs" in features and source.random() < 0.5:
        drawn["prompt_logprobs"] = source.choice((0, 1))
    return drawn


def _random_beams(
    source: random.Random, length: int, vocab_size: int, *, stops: bool
) -> SamplingSpec:
    return SamplingSpec(
        beam=BeamSpec(
            num_beams=source.randint(2, MAX_BRANCHES),
            length_penalty=source.choice((0.0, 1.0)),
            early_stopping=source.choice((False, True, "never")),
        ),
        max_tokens=length,
        stop_token_ids=(source.randrange(FIRST_ORDINARY_ID, vocab_size),) if stops else (),
    )


def _random_stops(source: random.Random, vocab_size: int) -> tuple[int, ...]:
    """One id, or so many that a stop comes soon."""
    count = source.choice((1, max(1, vocab_size // 8)))
    return tuple(sorted({source.randrange(FIRST_ORDINARY_ID, vocab_size) for _ in range(count)}))


def _random_operations(
    source: random.Random, num_requests: int, max_tokens: int, features: frozenset[str]
) -> list[Operation]:
    operations = []
    if "running_resets" in features:
        step = source.randint(1, 2 * max_tokens)
        operations.append(Operation(kind="reset_running_requests", step=step))
    if "priorities" in features and source.random() < 0.5:
        operations.append(
            Operation(
                kind="set_priority",
                step=source.randint(1, max_tokens),
                request=f"r{source.randrange(num_requests)}",
                priority=source.randrange(_PRIORITIES),
            )
        )
    if "operations" not in features:
        return operations
    if source.random() < 0.5:
        request = f"r{source.randrange(num_requests)}"
        operations.append(
            Operation(kind="abort", step=source.randint(1, 2 * max_tokens), request=request)
        )
    if source.random() < 0.5:
        step = source.randint(1, 2 * max_tokens)
        operations.append(Operation(kind="reset_prefix_cache", step=step))
    return operations


# Later features -----------------------------------------------------------------------------------


def _second_batch(source: random.Random, workload: Workload, vocab_size: int) -> Workload:
    """The later half arrives together, after more steps than the others can well take."""
    requests = list(workload.requests)
    half = (len(requests) + 1) // 2
    end = 1 + max(request.arrival_step for request in requests[:half])
    end += sum(
        likely_steps(request.num_prompt_tokens, request.sampling.max_tokens)
        for request in requests[:half]
    )
    requests[half:] = [
        msgspec.structs.replace(request, arrival_step=end) for request in requests[half:]
    ]
    return msgspec.structs.replace(workload, requests=requests)


def _few_tokens(source: random.Random, workload: Workload, vocab_size: int) -> Workload:
    def changed(sampling: SamplingSpec) -> SamplingSpec:
        length = source.choice((0, 0, 1, 1, sampling.max_tokens))
        if sampling.beam is not None or sampling.n > 1:
            length = max(1, length)
        return msgspec.structs.replace(
            sampling, max_tokens=length, min_tokens=min(sampling.min_tokens, length)
        )

    return _with_samplings(workload, changed)


_LIKELY = 3
"""Ids that a bias makes likely: short words of them come up again and again."""

_BIAS = 8.0


def _likely_ids(source: random.Random, vocab_size: int) -> list[int]:
    """Of those that stand for one visible character each; a byte-level tokenizer has them too."""
    return source.sample(range(FIRST_ORDINARY_ID, min(vocab_size, _VISIBLE)), _LIKELY)


_VISIBLE = 64
_FIRST_VISIBLE = ord("!")


def _word(token_ids: Iterable[int]) -> str:
    return "".join(chr(_FIRST_VISIBLE + token_id) for token_id in token_ids)


def _bad_words(source: random.Random, workload: Workload, vocab_size: int) -> Workload:
    likely = _likely_ids(source, vocab_size)

    def changed(sampling: SamplingSpec) -> SamplingSpec:
        pairs = source.sample([(a, b) for a in likely for b in likely], 4)
        return msgspec.structs.replace(
            sampling,
            logit_bias=tuple((token_id, _BIAS) for token_id in likely),
            bad_words=tuple(_word(pair) for pair in pairs),
        )

    return _with_samplings(workload, changed, plain=True)


def _stop_strings(source: random.Random, workload: Workload, vocab_size: int) -> Workload:
    likely = _likely_ids(source, vocab_size)
    likely_words = [_word([token_id]) for token_id in likely]

    def changed(sampling: SamplingSpec) -> SamplingSpec:
        words = [_word(source.choices(likely, k=source.choice((2, 3)))) for _ in range(2)]
        if source.random() < 0.5:  # one that ends where another does
            words.insert(source.randrange(3), source.choice(likely_words) + words[0])
        least = sampling.min_tokens
        if source.random() < 0.5 and sampling.regex is None:
            least = source.randint(0, sampling.max_tokens)
        return msgspec.structs.replace(
            sampling,
            logit_bias=tuple((token_id, _BIAS) for token_id in likely),
            stop=tuple(words),
            min_tokens=least,
        )

    return _with_samplings(workload, changed, plain=True)


_REGEXES = ("[0-9]{4,30}", "(AB|CD|EF){2,12}", "[A-F]{3,20}[0-9]", "A(0|1)*B")


def _grammars(source: random.Random, workload: Workload, vocab_size: int) -> Workload:
    def changed(sampling: SamplingSpec) -> SamplingSpec:
        # What else forbids or ends could leave no token at all.
        return msgspec.structs.replace(
            sampling,
            regex=source.choice(_REGEXES),
            ignore_eos=False,
            stop=(),
            stop_token_ids=(),
            min_tokens=0,
            logits_processors=(),
            bad_words=(),
        )

    return _with_samplings(workload, changed, plain=True)


def _with_samplings(
    workload: Workload, changed: Callable[[SamplingSpec], SamplingSpec], *, plain: bool = False
) -> Workload:
    """Every request with other parameters; with `plain` those of beam searches stay."""
    requests = [
        request
        if plain and request.sampling.beam is not None
        else msgspec.structs.replace(request, sampling=changed(request.sampling))
        for request in workload.requests
    ]
    return msgspec.structs.replace(workload, requests=requests)


def _eos(source: random.Random, workload: Workload, vocab_size: int) -> Workload:
    def changed(sampling: SamplingSpec) -> SamplingSpec:
        ignored = source.random() < 0.3 and sampling.regex is None  # a grammar ends by it only
        return msgspec.structs.replace(sampling, ignore_eos=ignored)

    return _with_samplings(workload, changed)


_LATER: dict[str, Callable[[random.Random, Workload, int], Workload]] = {
    "second_batch": _second_batch,
    "few_tokens": _few_tokens,
    "bad_words": _bad_words,
    "stop_strings": _stop_strings,
    "grammars": _grammars,
    "eos": _eos,
}


def _shaped(
    shapes: Iterable[PromptShape], vocab_size: int, block_size: int, seed: int | str
) -> list[list[int]]:
    return [
        shape_prompt(shape, vocab_size=vocab_size, block_size=block_size, seed=seed, index=index)
        for index, shape in enumerate(shapes)
    ]


def _workload(
    prompts: Sequence[list[int]], max_tokens: Sequence[int], arrivals: Sequence[int] | None = None
) -> Workload:
    steps = [0] * len(prompts) if arrivals is None else arrivals
    return Workload(
        requests=[
            RequestSpec(
                id=f"r{index}",
                prompt_token_ids=prompt,
                sampling=SamplingSpec(max_tokens=length),
                arrival_step=step,
            )
            for index, (prompt, length, step) in enumerate(
                zip(prompts, max_tokens, steps, strict=True)
            )
        ]
    )
