"""Plays a workload through an admission model, step by step. No engine, no token values.

It predicts *when* requests run, grow and are preempted, never what they say. Token ids matter to
prefix hits only; an output token that nobody measured stands for itself.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from preempt_harness._admission_model import AdmissionModel, may_stop_early
from preempt_harness._admission_pool import SimulatedPool
from preempt_harness._admission_request import SimulatedRequest, stand_in_of
from preempt_harness._admission_result import PredictedPreemption, Simulation
from preempt_harness.workload import RequestSpec, Workload


def simulate(
    workload: Workload,
    model: AdmissionModel,
    num_blocks: int,
    *,
    output_lengths: Mapping[str, int] | None = None,
    output_token_ids: Mapping[str, Sequence[int]] | None = None,
    num_accepted_drafts: int = 0,
) -> Simulation:
    """Play the workload through the admission model.

    In each step arrivals come first, then the workload's operations, then the schedule. Every
    running request whose known tokens are all computed gains one token, and as many more as drafts
    are taken to be accepted.

    Args:
        workload: requests and operations.
        model: the engine's rules.
        num_blocks: size of the pool, reserved blocks included.
        output_lengths: request -> output tokens, at least 1, that it gives when nothing cuts it
            short: of requests that finished in a baseline. Others run to their limit, and are
            reported as uncertain if they may stop earlier.
        output_token_ids: request -> ids of such an output. They give the length too, and sharpen
            prefix hits between requests that continue each other's text.
        num_accepted_drafts: of each request in each step in which it gains a token.
    """
    measured = {name: len(ids) for name, ids in (output_token_ids or {}).items()}
    lengths = {**(output_lengths or {}), **measured}
    run = _Run(workload, model, num_blocks, lengths, output_token_ids or {})
    run.num_accepted_drafts = num_accepted_drafts
    return run.play()


class _Run:
    """State of one simulation."""

    def __init__(
        self,
        workload: Workload,
        model: AdmissionModel,
        num_blocks: int,
        lengths: Mapping[str, int],
        outputs: Mapping[str, Sequence[int]],
    ) -> None:
        self.workload = workload
        self.model = model
        self.num_blocks = num_blocks
        self.lengths = lengths
        self.outputs = outputs
        self.pool = SimulatedPool(max(0, model.usable_blocks(num_blocks)))
        self.spare_blocks = model.watermark_blocks(num_blocks)
        self.content_ids: dict[Hashable, int] = {}
        self.waiting: list[SimulatedRequest] = []
        self.running: list[SimulatedRequest] = []
        self.step = 0
        self.last_step = -1
        self.preemptions: list[PredictedPreemption] = []
        self.finished: dict[str, int] = {}
        self.truncated: list[str] = []
        self.infeasible: list[str] = []
        self.aborted: list[str] = []
        self.peak_blocks = 0
        self.num_scheduled = 0
        self.num_recomputed = 0
        self.num_accepted_drafts = 0
        self.draft_room = 0  # of the step's token budget
        self.own_draft_room: dict[str, int] = {}  # where drafts come first: request -> latest share

    def play(self) -> Simulation:
        """All steps until nothing is left."""
        arrivals = sorted(
            enumerate(self.workload.requests), key=lambda item: (item[1].arrival_step, item[0])
        )
        arrivals.reverse()
        while arrivals or self.waiting or self.running:
            if not self.waiting and not self.running:
                self._idle_until(arrivals[-1][1].arrival_step)
            while arrivals and arrivals[-1][1].arrival_step <= self.step:
                self._arrive(len(self.workload.requests) - len(arrivals), arrivals.pop()[1])
            self._operate()
            scheduled = self._schedule()
            if scheduled:
                self.last_step = self.step
            self.peak_blocks = max(self.peak_blocks, self.pool.num_used_blocks)
            self._update(scheduled)
            self.step += 1
        return self._result()

    def _arrive(self, arrival: int, spec: RequestSpec) -> None:
        model = self.model
        limit = model.output_limit(spec)
        prompt = spec.num_prompt_tokens
        if limit == 0 or model.blocks_for(prompt) > self.pool.num_blocks:
            self.infeasible.append(spec.id)
            return
        wanted = max(1, min(limit, self.lengths.get(spec.id, limit)))
        in_pool = self._outputs_in_pool(spec)
        self.waiting.append(
            SimulatedRequest(
                spec=spec,
                arrival=arrival,
                tokens=list(spec.prompt_token_ids),
                num_outputs_wanted=min(wanted, in_pool),
                truncated=wanted > in_pool,
                outputs=self.outputs.get(spec.id, ()),
                stand_in=stand_in_of(spec),
                num_sequences=spec.sampling.num_sequences,
            )
        )

    def _outputs_in_pool(self, spec: RequestSpec) -> int:
        """Output tokens with which the request alone, of whose last none is computed, fills it."""
        size, prompt = self.model.block_size, spec.num_prompt_tokens
        shared = prompt // size if spec.sampling.num_sequences > 1 else 0
        own = (self.pool.num_blocks - shared) // spec.sampling.num_sequences
        return max(1, (shared + own) * size + 1 - prompt)

    def _idle_until(self, step: int) -> None:
        """Pass over steps in which nobody is there; the cache can be reset all the same."""
        while self.step < step:
            self._operate()
            self.step += 1

    def _operate(self) -> None:
        for operation in self.workload.operations:
            if operation.step != self.step:
                continue
            if operation.kind == "reset_prefix_cache":
                self.pool.reset_prefix_cache()
            elif operation.kind == "abort":
                self._abort(operation.request)

    def _abort(self, name: str) -> None:
        for queue in (self.waiting, self.running):
            for request in queue:
                if request.spec.id == name:
                    queue.remove(request)
                    self.pool.release(request.table)
                    self.aborted.append(name)
                    return

    # One step -----------------------------------------------------------------------------------

    def _schedule(self) -> list[tuple[SimulatedRequest, int]]:
        """The step's work: requests and the position each is computed up to."""
        scheduled: list[tuple[SimulatedRequest, int]] = []
        num_before = len(self.preemptions)
        budget = self.model.max_num_batched_tokens
        self.draft_room = max(0, budget - sum(self._num_left(item) for item in self.running))
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            end = self._grow(request, budget)
            if end is None:
                break
            scheduled.append((request, end))
            budget -= min(budget, request.work(request.num_computed, end))
            budget -= self._take_drafts(request, end, budget)
            index += 1
        if len(self.preemptions) > num_before:
            return scheduled
        while self.waiting and budget > 0:
            request = self.waiting[0]
            seats = sum(item.num_sequences for item in (*self.running, request))
            if seats > self.model.max_num_seqs:
                break
            end = self._admit(request, budget)
            if end is None:
                break
            self.running.append(self.waiting.pop(0))
            scheduled.append((request, end))
            budget -= min(budget, request.work(request.num_computed, end))
        return scheduled

    def _take_drafts(self, request: SimulatedRequest, end: int, budget: int) -> int:
        """Tokens of the budget that a request's drafts have before whoever comes after it."""
        if not self.model.drafts_first or end < len(request.tokens) or not request.num_outputs:
            return 0
        self.own_draft_room[request.spec.id] = min(self.model.draft_tokens, budget)
        return self.own_draft_room[request.spec.id]

    @staticmethod
    def _num_left(request: SimulatedRequest) -> int:
        return request.work(request.num_computed, len(request.tokens))

    def _grow(self, request: SimulatedRequest, budget: int) -> int | None:
        """Extend a running request's table, preempting as needed; None if it became the victim."""
        model = self.model
        while True:
            end = request.reach(request.num_computed, budget)
            if model.policy == "greedy" and request.num_sequences == 1:
                end = self._cut_to_fit(request, end)
            lacking = model.blocks_of(request.spec, model.with_lookahead(end)) - len(request.table)
            if lacking <= self.pool.num_available_blocks:
                request.table += self.pool.take(lacking)
                return end
            victim = self.running.pop()
            alone = not self.running
            self._preempt(victim)
            if victim is request:
                if alone:  # nothing will ever give it more room than it had
                    self.waiting.remove(victim)
                    self.infeasible.append(victim.spec.id)
                return None

    def _cut_to_fit(self, request: SimulatedRequest, end: int) -> int:
        """The furthest position up to `end` that the free blocks hold, at least one token on."""
        model = self.model
        room = (len(request.table) + self.pool.num_available_blocks) * model.block_size
        return max(request.num_computed + 1, min(end, room - model.lookahead_tokens))

    def _preempt(self, victim: SimulatedRequest) -> None:
        self.preemptions.append(
            PredictedPreemption(self.step, victim.spec.id, victim.num_computed, victim.num_outputs)
        )
        self.pool.release(victim.table)
        victim.table = []
        victim.num_findable = 0
        victim.num_computed = 0
        position = sum(other.arrival < victim.arrival for other in self.waiting)
        self.waiting.insert(position, victim)

    def _admit(self, request: SimulatedRequest, budget: int) -> int | None:
        """Give the head of the queue its blocks; None if it does not fit."""
        model, pool = self.model, self.pool
        hits = self._find_prefix(request)
        start = len(hits) * model.block_size
        end = request.reach(start, budget)
        spare = self.spare_blocks if self.running else 0
        room = pool.num_available_blocks - pool.num_revived(hits) - spare
        if model.policy == "greedy":
            end = min(end, start + room * model.block_size)
            if end <= start:
                return None
        num_reserved = {
            "full_prompt": len(request.tokens),
            "full_fit": len(request.tokens),
            "chunk": end,
            "greedy": end,
            "output_reserved": model.with_lookahead(
                request.spec.num_prompt_tokens + request.num_outputs_wanted - 1
            ),
        }[model.policy]
        needed = model.blocks_of(request.spec, num_reserved) - len(hits)
        if needed + self._num_lookahead_blocks(request) > room:
            return None
        if model.policy == "full_fit":
            needed = model.blocks_of(request.spec, end) - len(hits)
        pool.share(hits)
        request.table = hits + pool.take(needed)
        request.num_findable = len(hits)
        request.num_resets = self.pool.num_resets
        request.num_computed = start
        return end

    def _num_lookahead_blocks(self, request: SimulatedRequest) -> int:
        """Room for first drafts, which an engine that drafts wants beside others."""
        if not self.running or self.model.drafts_first:
            return 0
        model, known = self.model, len(request.tokens)
        most = request.spec.num_prompt_tokens + request.num_outputs_wanted - 1
        end = max(known, min(known + model.draft_tokens, most))
        return model.blocks_of(request.spec, end) - model.blocks_of(request.spec, known)

    def _update(self, scheduled: list[tuple[SimulatedRequest, int]]) -> None:
        ended = []
        for request, end in scheduled:
            start = request.num_computed
            self.num_scheduled += request.work(start, end)
            again = max(start, min(end, request.high_water))
            self.num_recomputed += request.work(start, again)
            request.num_computed = end
            request.high_water = max(request.high_water, end)
            self._make_findable(request)
            if end == len(request.tokens):
                self._gain(request)
                if request.num_outputs == request.num_outputs_wanted:
                    ended.append(request)
        # Who wants no token ends when the prompt is read, before anybody's token is chosen.
        for request in sorted(ended, key=lambda request: request.spec.sampling.max_tokens > 0):
            self._finish(request)

    def _gain(self, request: SimulatedRequest) -> None:
        """Accepted drafts and one token more, of which all but that one are computed."""
        left = request.num_outputs_wanted - request.num_outputs
        drafts = self.num_accepted_drafts if request.num_outputs else 0
        room = self.draft_room
        if self.model.drafts_first:
            room = self.own_draft_room.get(request.spec.id, 0)
        count = min(left, 1 + min(drafts, room))
        self.draft_room -= count - 1
        for _ in range(count):
            request.append_output()
        if count > 1:
            room = len(request.table) * self.model.block_size // request.num_sequences
            request.num_computed = min(len(request.tokens) - 1, room)

    def _finish(self, request: SimulatedRequest) -> None:
        self.running.remove(request)
        self.pool.release(request.table)
        self.finished[request.spec.id] = request.num_outputs
        if request.truncated:
            self.truncated.append(request.spec.id)

    # Prefix cache -------------------------------------------------------------------------------

    def _content(self, request: SimulatedRequest, index: int) -> Hashable:
        """Names the content of a full block and of all blocks before it."""
        size = self.model.block_size
        while len(request.contents) <= index:
            first = len(request.contents) * size
            parent = request.contents[-1] if request.contents else None
            link = (parent, tuple(request.tokens[first : first + size]))
            request.contents.append(self.content_ids.setdefault(link, len(self.content_ids)))
        return request.contents[index]

    def _find_prefix(self, request: SimulatedRequest) -> list[int]:
        """Blocks found for the request's first tokens, never for all of them."""
        hits: list[int] = []
        size = self.model.block_size
        if not self.model.prefix_caching:
            return hits
        for index in range(request.num_findable_tokens(len(request.tokens) - 1) // size):
            block = self.pool.find(self._content(request, index))
            if block is None:
                break
            hits.append(block)
        return hits

    def _make_findable(self, request: SimulatedRequest) -> None:
        if not self.model.prefix_caching or request.num_resets != self.pool.num_resets:
            return
        num_full = request.num_findable_tokens(request.num_computed) // self.model.block_size
        for index in range(request.num_findable, num_full):
            content, own = self._content(request, index), request.table[index]
            known = self.pool.find(content)
            if known in (None, own) or not self.model.merges_equal_blocks:
                self.pool.make_findable(own, content)
                continue
            self.pool.share([known])
            self.pool.release([own])
            request.table[index] = known
        request.num_findable = max(request.num_findable, num_full)

    def _result(self) -> Simulation:
        uncertain = (
            spec.id
            for spec in self.workload.requests
            if may_stop_early(spec) and spec.id not in self.lengths
        )
        return Simulation(
            num_blocks=self.num_blocks,
            preemptions=tuple(self.preemptions),
            steps=self.step,
            last_step=self.last_step,
            finished=self.finished,
            truncated=tuple(self.truncated),
            infeasible=tuple(self.infeasible),
            aborted=tuple(self.aborted),
            peak_blocks=self.peak_blocks,
            num_scheduled_tokens=self.num_scheduled,
            num_recomputed_tokens=self.num_recomputed,
            uncertain=tuple(uncertain),
        )
