"""Block counts that can be argued on paper: what never preempts, and what must.

Owns the inequalities and their wording, each true of every engine that obeys the declared
`AdmissionModel`, whatever its prefix cache holds. Plays no simulation. docs/budgets.md writes the
arguments out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

from preempt_harness.admission import AdmissionModel, may_stop_early
from preempt_harness.workload import RequestSpec, Workload

_LISTED = 6  # requests that a sum spells out before it is cut short


@dataclass(frozen=True, slots=True)
class Demand:
    """What one request asks of the pool, in tokens and blocks.

    Attributes:
        spec: the request.
        most_outputs: no output of it has more tokens than this.
        least_outputs: each has at least so many if the request is not aborted.
        abort_step: when an operation ends it; None for never.
        most_blocks: it never holds more.
        formula: `most_blocks` spelled out.
    """

    spec: RequestSpec
    most_outputs: int
    least_outputs: int
    abort_step: int | None
    most_blocks: int
    formula: str

    @property
    def request(self) -> str:
        """Its id."""
        return self.spec.id

    @property
    def arrival_step(self) -> int:
        """When it enters."""
        return self.spec.arrival_step

    @property
    def num_prompt_tokens(self) -> int:
        return self.spec.num_prompt_tokens

    @property
    def num_sequences(self) -> int:
        return self.spec.sampling.num_sequences

    def least_blocks(self, model: AdmissionModel, num_tokens: int) -> int:
        """Blocks that it holds at least once every sequence of it has computed so many tokens."""
        if self.spec.sampling.beam is not None:  # one may have begotten all of them just now
            return model.blocks_for(num_tokens)
        return model.blocks_of(self.spec, num_tokens)


def demands(
    workload: Workload, model: AdmissionModel, output_lengths: Mapping[str, int]
) -> list[Demand]:
    """Demands of the requests that some pool can run, in order of arrival."""
    aborts = {
        operation.request: operation.step
        for operation in reversed(workload.operations)
        if operation.kind == "abort"
    }
    runnable = (spec for spec in workload.requests if model.output_limit(spec) > 0)
    return [
        _demand(spec, model, output_lengths.get(spec.id), aborts.get(spec.id))
        for spec in sorted(runnable, key=lambda spec: spec.arrival_step)
    ]


def _demand(
    spec: RequestSpec, model: AdmissionModel, length: int | None, abort_step: int | None
) -> Demand:
    limit = model.output_limit(spec)
    if length is not None:
        most = least = max(1, min(limit, length))
        if spec.sampling.num_sequences > 1 and may_stop_early(spec):  # of the longest output
            least = max(1, min(most, spec.sampling.min_tokens))
    elif may_stop_early(spec):
        most, least = limit, max(1, min(limit, spec.sampling.min_tokens))
    else:
        most = least = limit
    prompt = spec.num_prompt_tokens
    uncomputed = 0 if model.last_token_needs_room else 1
    tokens = model.with_lookahead(prompt + most - uncomputed)
    return Demand(
        spec=spec,
        most_outputs=most,
        least_outputs=least,
        abort_step=abort_step,
        most_blocks=model.blocks_of(spec, tokens),
        formula=_formula(spec, model, f"{prompt} + {most} - {uncomputed}", tokens),
    )


def _formula(spec: RequestSpec, model: AdmissionModel, length: str, num_tokens: int) -> str:
    """The most blocks of a request, spelled out."""
    ahead = f" + {model.lookahead_tokens}" if model.lookahead_tokens else ""
    blocks = f"ceil(({length}{ahead}) / {model.block_size})"
    count = spec.sampling.num_sequences
    if count > 1:
        shared = spec.num_prompt_tokens // model.block_size
        blocks = f"{shared} + {count} * ({blocks} - {shared})"
    return f"{spec.id}: {blocks} = {model.blocks_of(spec, num_tokens)}"


def largest_demands(wanted: list[Demand], model: AdmissionModel) -> list[Demand]:
    """The demands that can meet in the pool at once and add up to most."""
    return sorted(wanted, key=lambda demand: -demand.most_blocks)[: model.max_num_seqs]


def never_statement(together: list[Demand], usable: int) -> str:
    """Why `usable` blocks cannot run out, given that all of `together` fit."""
    total = sum(demand.most_blocks for demand in together)
    terms = [demand.formula for demand in together[:_LISTED]]
    if len(together) > _LISTED:
        rest = sum(demand.most_blocks for demand in together[_LISTED:])
        terms.append(f"{len(together) - _LISTED} more: {rest}")
    return (
        f"requests that run at once hold at most {'; '.join(terms)}; "
        f"in all {total} <= {usable} usable blocks"
    )


@dataclass(frozen=True, slots=True)
class ForceArgument:
    """Why the first requests of a workload must preempt in a range of block counts.

    All of `requests` arrive together and ahead of every other. As long as nothing is preempted they
    are admitted, since even after `num_prefill_steps` steps of growth they hold no more than
    `admission_blocks`; then they grow by a token in every step at least. Before any of those
    counted in `peak_blocks` has finished they would hold `peak_blocks` together.

    Attributes:
        num_prefill_steps: after so many steps all prompts are computed.
        admission_blocks: most blocks they hold until then.
        peak_step: step, counted from their arrival, that needs `peak_blocks`; with drafts, the
            earliest one in which a request can end.
        peak_blocks: blocks they need in that step at least.
        unfinished: those still running in that step.
        num_shared_blocks: blocks that prefix sharing may save at most; already taken off.
    """

    requests: tuple[str, ...]
    arrival_step: int
    num_prefill_steps: int
    admission_blocks: int
    peak_step: int
    peak_blocks: int
    unfinished: tuple[str, ...]
    num_shared_blocks: int

    def holds(self, model: AdmissionModel, num_blocks: int) -> bool:
        """Whether it shows that a pool of this size preempts."""
        usable = model.usable_blocks(num_blocks)
        admits = self.admission_blocks + model.watermark_blocks(num_blocks) <= usable
        return admits and usable < self.peak_blocks

    def statement(self, model: AdmissionModel, num_blocks: int) -> str:
        """The argument in words, for a pool of this size."""
        usable = model.usable_blocks(num_blocks)
        spare = model.watermark_blocks(num_blocks)
        prefilled = self.arrival_step + self.num_prefill_steps - 1
        peak = self.arrival_step + self.peak_step
        watermark = f" + {spare} of the watermark" if spare else ""
        shared = f" ({self.num_shared_blocks} shared)" if self.num_shared_blocks else ""
        when = f"in step {peak} {_names(self.unfinished)} still run and"
        if model.draft_tokens:
            when = (
                f"the first of {_names(self.unfinished)} ends in step {peak} at the earliest, "
                f"and then they"
            )
        return (
            f"{_names(self.requests)} arrive in step {self.arrival_step} and are all admitted and "
            f"prefilled by step {prefilled}, since they hold at most {self.admission_blocks} blocks"
            f"{watermark} <= {usable} usable until then; {when} "
            f"need {self.peak_blocks} blocks{shared} > {usable}, so a request "
            f"is preempted by then"
        )


def force_arguments(wanted: list[Demand], model: AdmissionModel) -> Iterator[ForceArgument]:
    """All arguments about the first k requests, k = 2, 3, ...

    None with lookahead: a step may then bring several tokens, and nobody knows how many.
    """
    if model.policy == "output_reserved" or model.lookahead_tokens or not wanted:
        return
    first = wanted[0].arrival_step
    together = [demand for demand in wanted if demand.arrival_step == first]
    most = min(model.max_num_seqs, model.max_num_batched_tokens)
    for count in range(2, len(together) + 1):
        if _num_sequences(together[:count]) > most:
            return
        argument = _force_argument(together[:count], model)
        if argument is not None:
            yield argument


def _num_sequences(group: list[Demand]) -> int:
    return sum(demand.num_sequences for demand in group)


def _force_argument(group: list[Demand], model: AdmissionModel) -> ForceArgument | None:
    """The argument for one group; None if sharing or aborts leave nothing certain."""
    tokens = sum(demand.num_prompt_tokens for demand in group)
    most_per_step = model.draft_tokens + 1
    # While a prompt is incomplete, at most the sequences of the others take tokens of the step.
    room = model.max_num_batched_tokens - (_num_sequences(group) - 1) * most_per_step
    if room < 1:
        return None
    prefill_steps = -(-tokens // room)
    shared = _most_shared_blocks(group, model, prefill_steps)
    if shared is None:
        return None
    admission = sum(
        model.blocks_of(
            demand.spec,
            model.with_lookahead(
                demand.num_prompt_tokens
                + min(prefill_steps * most_per_step, demand.most_outputs)
                - 1
            ),
        )
        for demand in group
    )
    peak = (_peak_at_first_end if model.draft_tokens else _peak_at_a_step)(
        group, model, prefill_steps
    )
    if peak is None:
        return None
    return ForceArgument(
        requests=tuple(demand.request for demand in group),
        arrival_step=group[0].arrival_step,
        num_prefill_steps=prefill_steps,
        admission_blocks=admission,
        peak_step=peak.step,
        peak_blocks=peak.num_blocks - shared,
        unfinished=tuple(demand.request for demand in peak.unfinished),
        num_shared_blocks=shared,
    )


class _Peak(NamedTuple):
    """A step in which some of a group still run, and the blocks that they need in it."""

    step: int
    num_blocks: int
    unfinished: list[Demand]


def _peak_at_a_step(group: list[Demand], model: AdmissionModel, prefill_steps: int) -> _Peak | None:
    """The step that needs most, where each request grows by one token in every step."""
    peaks = []
    for step in sorted({demand.least_outputs - 1 for demand in group}):
        if step < prefill_steps:
            continue
        unfinished = [
            demand
            for demand in group
            if demand.least_outputs > step
            and (demand.abort_step is None or demand.abort_step > demand.arrival_step + step)
        ]
        blocks = sum(
            demand.least_blocks(model, demand.num_prompt_tokens + step - prefill_steps + 1)
            for demand in unfinished
        )
        peaks.append(_Peak(step, blocks, unfinished))
    return max(peaks, key=lambda peak: peak.num_blocks, default=None)


def _peak_at_first_end(
    group: list[Demand], model: AdmissionModel, prefill_steps: int
) -> _Peak | None:
    """The step in which the first of a group ends, whichever that is, where drafts let them grow
    by several tokens in a step: it is at its full length, the others have come as far as one token
    a step brings them."""
    going_on = [demand for demand in group if demand.abort_step is None]
    peaks = []
    for first in going_on:
        step = -(-(first.least_outputs - 1) // (model.draft_tokens + 1))
        if step < prefill_steps:
            return None
        lengths = [
            first.least_outputs - 1 if demand is first else step - prefill_steps + 1
            for demand in going_on
        ]
        blocks = sum(
            demand.least_blocks(model, demand.num_prompt_tokens + length)
            for demand, length in zip(going_on, lengths, strict=True)
        )
        peaks.append(_Peak(step, blocks, going_on))
    return min(peaks, key=lambda peak: peak.num_blocks, default=None)


def _most_shared_blocks(
    group: list[Demand], model: AdmissionModel, prefill_steps: int
) -> int | None:
    """Blocks that prefix sharing can save the group at most; None if nothing bounds it.

    Only full blocks of prompts are shared, for tables begin with hits and grow by new blocks. When
    admission takes several steps a prompt that continues another request's prompt might also hit
    that request's output, which nobody knows here. Where equal blocks are merged, outputs may be
    equal that follow equal prompts, or follow what another prompt says.
    """
    if not model.prefix_caching:
        return 0
    prompts = [tuple(demand.spec.prompt_token_ids) for demand in group]
    for one, other in permutations(prompts, 2):
        continued = len(one) < len(other) and prefill_steps > 1
        if (continued or model.merges_equal_blocks) and other[: len(one)] == one:
            return None
    size = model.block_size
    full = [prompt[:end] for prompt in prompts for end in range(size, len(prompt) + 1, size)]
    return len(full) - len(set(full))


def _names(requests: tuple[str, ...]) -> str:
    listed = ", ".join(requests[:_LISTED])
    if len(requests) > _LISTED:
        listed += f" and {len(requests) - _LISTED} more"
    return listed
