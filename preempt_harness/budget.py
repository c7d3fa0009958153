"""How many KV blocks make a workload preempt: solved, with the reason, instead of guessed.

Owns the choice of a block count and the claim that comes with it. Every claim is "proved" (an
inequality that holds for each engine that obeys the declared admission model) or "simulated" (the
admission model was played, see `preempt_harness.admission`). Knows no engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import msgspec

from preempt_harness._budget_proof import (
    Demand,
    ForceArgument,
    demands,
    force_arguments,
    largest_demands,
    never_statement,
)
from preempt_harness._outputs_apart import apart
from preempt_harness.admission import AdmissionModel, Simulation, simulate
from preempt_harness.errors import HarnessError
from preempt_harness.workload import Workload

Verdict = Literal["preempts", "never_preempts", "infeasible"]

_SEVERAL = 2  # preemptions that a tight budget likes to have
_CALM = 1.0  # recomputed tokens per first-computed token; beyond it the pool thrashes
_SCAN = 64  # counts that a first look simulates; all are, if none of these preempts
_ADVICE = "Add requests, make outputs longer (max_tokens), or force a preemption with a plan."


class BudgetError(HarnessError, ValueError):
    """A budget is asked for in a way that has no answer."""


class NoPreemptingBudgetError(BudgetError):
    """No block count lets every request run and still preempts."""


class Proof(msgspec.Struct, frozen=True):
    """Why a verdict holds. `kind` is "proved" or "simulated"; `statement` is a readable reason."""

    kind: Literal["proved", "simulated"]
    statement: str


@dataclass(frozen=True, eq=False)
class KVBudget:
    """A number of KV blocks for a workload, and what it will do.

    Attributes:
        num_blocks: size of the pool, reserved blocks included.
        verdict: "preempts", "never_preempts", or "infeasible": some request cannot run to its end
            even alone.
        proof: why.
        workload, admission, output_lengths: what it was solved for.
    """

    num_blocks: int
    verdict: Verdict
    proof: Proof
    workload: Workload = field(repr=False)
    admission: AdmissionModel = field(repr=False)
    output_lengths: Mapping[str, int] = field(default_factory=dict, repr=False)

    @classmethod
    def solve(
        cls,
        workload: Workload,
        admission: AdmissionModel,
        want: str | int = "tight",
        *,
        output_lengths: Mapping[str, int] | None = None,
    ) -> KVBudget:
        """Choose a block count, or judge one.

        Args:
            workload: what will run.
            admission: the engine's rules.
            want: "tight" (preempts, see `tight`), "roomy" (see `roomy`), "minimal" (the smallest
                count in which every request can run to its end alone), or a number of blocks.
            output_lengths: request -> output tokens that it gives when nothing cuts it short, where
                they are known, as of requests that finished in a baseline.

        Raises:
            NoPreemptingBudgetError: "tight" is wanted and no count preempts.
            BudgetError: `want` is none of the above.
        """
        if want == "tight":
            return cls.tight(workload, admission, output_lengths=output_lengths)
        solver = _Solver(workload, admission, output_lengths or {})
        if want == "roomy":
            return solver.budget(solver.num_blocks_roomy)
        if want == "minimal":
            return solver.budget(solver.num_blocks_min)
        if isinstance(want, bool) or not isinstance(want, int) or want < 1:
            raise BudgetError(
                f"budget={want!r} is no budget.",
                'Give "tight", "roomy", "minimal" or a positive number of blocks.',
            )
        return solver.budget(want)

    @classmethod
    def tight(
        cls,
        workload: Workload,
        admission: AdmissionModel,
        *,
        at_least: int = 1,
        output_lengths: Mapping[str, int] | None = None,
    ) -> KVBudget:
        """The most suitable count that preempts at least so many times by the admission model.

        Little recomputation is preferred to thrash, a proved count to a simulated one, several
        preemptions to one, and of equals a large count to a small one.

        Raises:
            NoPreemptingBudgetError: no count lets every request run and preempts so often.
        """
        solver = _Solver(workload, admission, output_lengths or {})
        return solver.budget(solver.num_blocks_tight(at_least))

    @classmethod
    def roomy(
        cls,
        workload: Workload,
        admission: AdmissionModel,
        *,
        output_lengths: Mapping[str, int] | None = None,
    ) -> KVBudget:
        """A count that never preempts and in which admission never waits for a block."""
        return cls.solve(workload, admission, "roomy", output_lengths=output_lengths)

    @property
    def num_blocks_min(self) -> int:
        """Smallest count in which every request can run to its end, alone at least."""
        return self._solver.num_blocks_min

    @property
    def num_blocks_never(self) -> int:
        """Smallest count that provably never preempts."""
        return self._solver.num_blocks_never

    def simulation(self) -> Simulation:
        """The admission model's prediction for this count."""
        return self._solver.simulation(self.num_blocks)

    def would_preempt(self, num_blocks: int) -> bool:
        """Whether another count would preempt."""
        return self._solver.judge(num_blocks)[0] == "preempts"

    def explain(self) -> str:
        """The verdict with its reason, and what would preempt if this count does not."""
        texts = {
            "preempts": "blocks preempt",
            "never_preempts": "blocks never preempt",
            "infeasible": "blocks are too few",
        }
        own = (
            f"{self.num_blocks} {texts[self.verdict]} ({self.proof.kind}): {self.proof.statement}."
        )
        if self.verdict == "preempts":
            return own
        try:
            other = self._solver.num_blocks_tight(1)
        except NoPreemptingBudgetError as error:
            return f"{own} {error}"
        proof = self._solver.judge(other)[1]
        return f"{own} {other} blocks would preempt {_because(proof)}"

    def to_builtins(self) -> dict[str, Any]:
        """Count, verdict, proof and admission model, for a record's header."""
        return {
            "num_blocks": self.num_blocks,
            "verdict": self.verdict,
            "proof": msgspec.to_builtins(self.proof),
            "num_blocks_min": self.num_blocks_min,
            "num_blocks_never": self.num_blocks_never,
            "admission": msgspec.to_builtins(self.admission),
            "output_lengths": dict(self.output_lengths),
        }

    @cached_property
    def _solver(self) -> _Solver:
        return _Solver(self.workload, self.admission, self.output_lengths)


class _Solver:
    """Judges block counts for one workload; simulates each count once."""

    def __init__(
        self, workload: Workload, admission: AdmissionModel, output_lengths: Mapping[str, int]
    ) -> None:
        self.asked = (workload, output_lengths)
        if admission.outputs_apart:
            workload, output_lengths = apart(workload, output_lengths)
        self.workload = workload
        self.admission = admission
        self.output_lengths = output_lengths
        self.demands = demands(workload, admission, output_lengths)
        self.together = largest_demands(self.demands, admission)
        self._simulations: dict[int, Simulation] = {}

    @cached_property
    def largest(self) -> Demand | None:
        """The request that needs most blocks alone; None if no pool can run any."""
        return self.together[0] if self.together else None

    @cached_property
    def arguments(self) -> list[ForceArgument]:
        return list(force_arguments(self.demands, self.admission))

    @cached_property
    def num_blocks_min(self) -> int:
        most = self.largest.most_blocks if self.largest else 1
        return self.admission.reserved_blocks + most

    @cached_property
    def num_blocks_never(self) -> int:
        if self.admission.policy == "output_reserved":
            return self.num_blocks_min
        total = sum(demand.most_blocks for demand in self.together)
        return max(self.num_blocks_min, self.admission.reserved_blocks + total)

    @cached_property
    def num_blocks_roomy(self) -> int:
        total = sum(demand.most_blocks for demand in self.together)
        num_blocks = max(self.num_blocks_min, self.admission.reserved_blocks + total)
        fixed = num_blocks
        while num_blocks - self.admission.watermark_blocks(num_blocks) < fixed:
            num_blocks += 1
        return num_blocks

    def simulation(self, num_blocks: int) -> Simulation:
        """The admission model's prediction, played once per count."""
        if num_blocks not in self._simulations:
            played = [
                simulate(
                    self.workload,
                    self.admission,
                    num_blocks,
                    output_lengths=self.output_lengths,
                    num_accepted_drafts=accepted,
                )
                for accepted in {0, self.admission.draft_tokens}
            ]
            # How many drafts come true nobody knows: at worst it is what preempts least.
            self._simulations[num_blocks] = min(played, key=lambda item: item.num_preemptions)
        return self._simulations[num_blocks]

    def budget(self, num_blocks: int) -> KVBudget:
        """The count with its verdict."""
        verdict, proof = self.judge(num_blocks)
        workload, output_lengths = self.asked
        return KVBudget(num_blocks, verdict, proof, workload, self.admission, output_lengths)

    def judge(self, num_blocks: int) -> tuple[Verdict, Proof]:
        """What the count does, on paper where that is possible, else by simulation."""
        model = self.admission
        usable = model.usable_blocks(num_blocks)
        if num_blocks < self.num_blocks_min:
            alone = self.largest.formula if self.largest else "a pool needs 1"
            return "infeasible", Proof("proved", f"{alone} blocks alone > {max(0, usable)} usable")
        if model.policy == "output_reserved":
            statement = "admission takes the blocks of the whole output, so nothing grows"
            return "never_preempts", Proof("proved", statement)
        if num_blocks >= self.num_blocks_never:
            return "never_preempts", Proof("proved", never_statement(self.together, usable))
        argument = self.argument(num_blocks)
        if argument is not None:
            return "preempts", Proof("proved", argument.statement(model, num_blocks))
        simulation = self.simulation(num_blocks)
        verdict: Verdict = "preempts" if simulation.num_preemptions else "never_preempts"
        guess = ", be all drafts accepted or none" if model.draft_tokens else ""
        return verdict, Proof("simulated", _simulated_statement(simulation) + guess)

    def argument(self, num_blocks: int) -> ForceArgument | None:
        """A proof that the count preempts, if there is one."""
        for argument in self.arguments:
            if argument.holds(self.admission, num_blocks):
                return argument
        return None

    def num_blocks_tight(self, at_least: int) -> int:
        """See `KVBudget.tight`."""
        if at_least < 1:
            raise BudgetError(f"at_least={at_least} is not a count.", "Give 1 or more.")
        counts = range(self.num_blocks_min, self.num_blocks_never)
        for selection in self._selections(counts):
            best = self._most_suitable(selection, at_least)
            if best is not None:
                return best
        most = max((self.simulation(count).num_preemptions for count in counts), default=0)
        raise NoPreemptingBudgetError(self._no_budget_text(at_least, most), _ADVICE)

    def _selections(self, counts: range) -> Iterator[list[int]]:
        """First a few counts, spread out and at the ends of proofs; then all.

        Preemption is not monotone in the number of blocks, so a bisection would not do.
        """
        if len(counts) > _SCAN:
            spread = {counts[index * (len(counts) - 1) // (_SCAN - 1)] for index in range(_SCAN)}
            reserved = self.admission.reserved_blocks
            ends = {argument.peak_blocks - 1 + reserved for argument in self.arguments}
            yield sorted(spread | (ends & set(counts)))
        yield list(counts)

    def _most_suitable(self, counts: list[int], at_least: int) -> int | None:
        """The best of the counts that preempt so often, the likely ones simulated first."""
        if not counts:
            return None
        peak = self.simulation(self.num_blocks_never).peak_blocks + self.admission.reserved_blocks
        proved = {count for count in counts if self.argument(count) is not None}
        best: int | None = None
        best_rank = (False, False, False)
        # The less certain a count is, the more a small one is worth.
        sign = -1 if self.admission.draft_tokens else 1
        for count in sorted(counts, key=lambda n: (n in proved, n < peak, sign * n), reverse=True):
            if best_rank[:2] == (True, True) and count not in proved:
                break  # those that follow are not proved either
            simulation = self.simulation(count)
            if simulation.num_preemptions < at_least:
                continue
            calm = simulation.recompute_ratio <= _CALM
            rank = (calm, count in proved, simulation.num_preemptions >= _SEVERAL)
            if best is None or rank > best_rank:
                best, best_rank = count, rank
            if rank == (True, count in proved, True):
                break  # those that follow rank no higher
        return best

    def _no_budget_text(self, at_least: int, most: int) -> str:
        low, high = self.num_blocks_min, self.num_blocks_never
        if self.admission.policy == "output_reserved":
            return (
                "This engine's admission takes the blocks of the whole output: it never preempts."
            )
        if high <= low:
            return f"No block count preempts: {low} blocks, the least possible, hold all requests."
        span = f"{low} to {high - 1}"
        if most:
            return f"No block count preempts {at_least} times: {span} blocks do so {most} at most."
        return (
            f"No block count preempts: with {span} blocks requests finish, or wait for admission, "
            f"before others grow, and {high} hold them all."
        )


def _because(proof: Proof) -> str:
    return f"({proof.kind}): {proof.statement}."


def _simulated_statement(simulation: Simulation) -> str:
    guess = ""
    if simulation.uncertain:
        guess = f", if {', '.join(simulation.uncertain)} do not stop early"
    if not simulation.num_preemptions:
        return (
            f"the admission model uses {simulation.peak_blocks} blocks at most and preempts "
            f"nothing{guess}"
        )
    first = simulation.preemptions[0]
    return (
        f"the admission model preempts {first.request} in step {first.step} after "
        f"{first.num_output_tokens} output tokens (preemptions in all: "
        f"{simulation.num_preemptions}){guess}"
    )
