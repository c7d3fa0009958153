"""From the rows of a step to what users get: scored, sampled or searched, built and told.

Owns the outputs under construction, and all that is kept for a request until it ends. Tokens are
chosen here and nowhere else; who computes what is the scheduler's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from preempt_engine.beam_search import BeamSearch
from preempt_engine.errors import EngineError
from preempt_engine.intake import Arrival
from preempt_engine.output_builder import OutputBuilder
from preempt_engine.outputs import RequestOutput
from preempt_engine.sampling.history import ProcessorStates
from preempt_engine.sampling.logprobs import read_row
from preempt_engine.sampling.params import BeamSearchParams
from preempt_engine.sampling.sampler import SampledToken, SampleRequest, sample
from preempt_engine.scheduler import Scheduler
from preempt_engine.scoring import PromptReader
from preempt_engine.sequence import Request, Sequence
from preempt_engine.step import LogitsBatch, SchedulerOutput, SequenceKey

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


Wanted: TypeAlias = tuple[Request, Sequence, SampleRequest]
"""A token to choose, and for whom."""


class Delivery:
    """Outputs of one engine between two resets.

    Args:
        scheduler: is told of tokens and ends.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.prompts = PromptReader(scheduler)
        self._states = ProcessorStates()
        self._builders: dict[str, list[OutputBuilder]] = {}
        self._searches: dict[str, BeamSearch] = {}

    def begin(self, arrival: Arrival) -> None:
        """The request is queued: its outputs are built from now on."""
        request_id, builders = arrival.request.request_id, arrival.builders
        self._builders[request_id] = builders
        if arrival.recipe is not None:
            self._states.add(request_id, arrival.recipe)
        params = arrival.request.params
        if isinstance(params, BeamSearchParams):
            self._searches[request_id] = BeamSearch(
                params, builders[0].stop_ids, builders[0].max_output_tokens
            )

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; returns its output so far, or None if it is not running."""
        builders = self._builders.pop(request_id, None)
        if builders is None:
            return None
        self._searches.pop(request_id, None)
        request = self.scheduler.requests[request_id]
        _note_counts(builders[0].output, request)
        self._finish_branches(self.scheduler.next_step_id, builders, "abort")
        self._states.drop(request)
        self.scheduler.abort(request)
        return builders[0].output

    def check_nothing_is_left(self) -> None:
        """Assert that no request has left anything behind, when all have ended."""
        assert not self._builders, f"requests {list(self._builders)} ended and are still built"
        assert not self._searches, f"searches {list(self._searches)} ended and are kept"
        self._states.check_nothing_is_left()
        self.prompts.check_nothing_is_left()

    def deliver(
        self, step: SchedulerOutput, requests: list[Request | None], logits: LogitsBatch
    ) -> list[RequestOutput]:
        """Score, sample or search from the step's rows; returns the outputs that changed.

        Args:
            step: that was executed.
            requests: whose each scheduled sequence is, None for rows that nobody wants any more.
            logits: the step's rows.
        """
        wanted: list[Wanted] = []
        outputs: dict[str, RequestOutput] = {}
        first_row = 0
        for item, request in zip(step.scheduled, requests, strict=True):
            rows = range(first_row, first_row + item.num_logits)
            first_row = rows.stop
            if request is None or not rows:
                continue
            sequence = request.sequences[item.key.branch]
            if request.reads_prompt:
                builders = self._builders.get(request.request_id)
                rows = self.prompts.read(request, builders, logits, rows)
                if rows and request.params.max_tokens == 0:
                    outputs[request.request_id] = self._end_prompt(step.step_id, request)
                    continue
            if not rows:
                continue
            sequence.first_wanted_logits += 1
            if request.request_id in self._searches:
                if self._search(request, sequence, read_row(logits, rows[0])):
                    outputs[request.request_id] = self._finish_search(step.step_id, request)
            else:
                for one in self._branches(request, sequence):
                    wanted.append((request, one, self._sample_request(request, one, rows[0])))
        while wanted:
            wanted = self._choose_tokens(step.step_id, logits, wanted, outputs)
        return list(outputs.values())

    def _choose_tokens(
        self,
        step_id: int,
        logits: LogitsBatch,
        wanted: list[Wanted],
        outputs: dict[str, RequestOutput],
    ) -> list[Wanted]:
        """One more token for each sequence in `wanted`; adds to `outputs` those that changed.

        Returns:
            Sequences whose token was drafted: the next one can be sampled at once, from the row
            of the draft, with everything as it is after the draft.
        """
        if self._states:
            self._attach_states(wanted)
        tokens = sample(logits, [sample_request for _, _, sample_request in wanted])
        drafted: list[Wanted] = []
        for (request, sequence, sample_request), token in zip(wanted, tokens, strict=True):
            if isinstance(token, SampledToken):
                output = self._append_token(step_id, request, sequence, token)
            else:
                output = self._fail_branch(step_id, request, sequence, token)
            outputs[output.request_id] = output
            if sequence.newest_was_drafted:
                sequence.first_wanted_logits += 1
                row = sample_request.row + 1
                drafted.append((request, sequence, self._sample_request(request, sequence, row)))
        return drafted

    def _branches(self, request: Request, sequence: Sequence) -> list[Sequence]:
        """Who samples from the sequence's logits: itself and, from the prompt's, all branches."""
        branches = [sequence]
        while request.next_branch < request.num_seqs:
            branches.append(self.scheduler.branches.fork(request, sequence))
        return branches

    def _sample_request(self, request: Request, sequence: Sequence, row: int) -> SampleRequest:
        branch = sequence.key.branch
        builder = self._builders[request.request_id][branch]
        return SampleRequest(
            row=row,
            params=builder.params,
            seed=request.seed,
            branch=branch,
            position=sequence.num_tokens,
            num_output_tokens=sequence.num_output_tokens,
            stop_ids=builder.stop_ids,
        )

    def _attach_states(self, wanted: list[Wanted]) -> None:
        for request, sequence, sample_request in wanted:
            sample_request.state = self._states.of(request, sequence)
            if sample_request.state is not None:
                sample_request.output_token_ids = sequence.output_token_ids

    def _append_token(
        self, step_id: int, request: Request, sequence: Sequence, token: SampledToken
    ) -> RequestOutput:
        self.scheduler.append_token(sequence, token.token_id)
        text = self._builders[request.request_id][sequence.key.branch].append(token)
        if self.scheduler.observer is not None:
            self.scheduler.observer.tokens_delivered(
                step_id,
                sequence.key,
                [token.token_id],
                None if token.logprobs is None else [token.logprobs],
                text,
            )
        return self._follow_up(request, sequence)

    def _fail_branch(
        self, step_id: int, request: Request, sequence: Sequence, error: EngineError
    ) -> RequestOutput:
        """No token can be chosen for the branch: it ends alone, the others go on."""
        text = self._builders[request.request_id][sequence.key.branch].fail(error)
        self._tell_text(step_id, sequence.key, text)
        return self._follow_up(request, sequence)

    def _follow_up(self, request: Request, sequence: Sequence) -> RequestOutput:
        """Let the branch, or the request, end if the branch's output says so."""
        builder = self._builders[request.request_id][sequence.key.branch]
        output = builder.output
        _note_counts(output, request)
        reason = builder.completion.finish_reason
        if output.finished:
            assert reason is not None
            self._finish(request, reason)
        elif reason is not None:
            self.scheduler.branches.end(request, sequence)
        return output

    def _end_prompt(self, step_id: int, request: Request) -> RequestOutput:
        """The prompt is computed, and no token after it is wanted."""
        builders = self._builders[request.request_id]
        self._finish_branches(step_id, builders, "length")
        _note_counts(builders[0].output, request)
        self._finish(request, "length")
        return builders[0].output

    def _finish(self, request: Request, reason: str) -> None:
        del self._builders[request.request_id]
        self._states.drop(request)
        self.scheduler.finish(request, reason)

    def _finish_branches(self, step_id: int, builders: list[OutputBuilder], reason: str) -> None:
        """End the branches that have not ended."""
        for builder in builders:
            if not builder.completion.finished():
                key = SequenceKey(builder.output.request_id, builder.completion.index)
                self._tell_text(step_id, key, builder.finish(reason))

    def _tell_text(self, step_id: int, key: SequenceKey, text: str) -> None:
        """Text that was held back until the branch ended without another token."""
        if text and self.scheduler.observer is not None:
            self.scheduler.observer.tokens_delivered(step_id, key, [], None, text)

    def _search(self, request: Request, sequence: Sequence, row: NDArray[np.float64]) -> bool:
        """Take in a beam's logits and go on when all beams have theirs; True ends the search."""
        search = self._searches[request.request_id]
        if not search.take_row(sequence.key.branch, row):
            return False
        beams = search.advance()
        if not beams:
            return True
        search.renumber(self.scheduler.branches.continue_beams(request, beams))
        return False

    def _finish_search(self, step_id: int, request: Request) -> RequestOutput:
        search = self._searches.pop(request.request_id)
        builders = self._builders.pop(request.request_id)
        for builder, hypothesis in zip(builders, search.hypotheses, strict=True):
            tokens = [
                SampledToken(token_id, {token_id: logprob})
                for token_id, logprob in hypothesis.tokens()
            ]
            for token in tokens:
                builder.append(token)
            builder.completion.score = hypothesis.score
            self.scheduler.counters.num_generated_tokens += len(tokens)
            if self.scheduler.observer is not None:
                self.scheduler.observer.tokens_delivered(
                    step_id,
                    SequenceKey(request.request_id, builder.completion.index),
                    builder.completion.token_ids,
                    builder.completion.logprobs,
                    builder.completion.text,
                )
        output = builders[0].output
        _note_counts(output, request)
        self.scheduler.finish(request, builders[0].completion.finish_reason or "length")
        return output


def _note_counts(output: RequestOutput, request: Request) -> None:
    output.num_cached_tokens = request.num_cached_tokens or 0
    output.num_preemptions = request.num_preemptions
