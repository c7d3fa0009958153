"""What is asked of the engine, made requests of; and why one can never run, if it cannot.

Owns the numbering of requests and with it their seeds. Queues nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from preempt_engine.batch import Params, Prompt
from preempt_engine.beam_search import BeamSearch
from preempt_engine.config import EngineConfig
from preempt_engine.errors import ConfigError, EngineError, InfeasibleRequestError, QueueFullError
from preempt_engine.executor.protocol import Executor
from preempt_engine.output_builder import OutputBuilder
from preempt_engine.sampling.noise import derive_seed
from preempt_engine.sampling.params import SamplingParams
from preempt_engine.sampling.recipes import ProcessorRecipe, RecipeBook
from preempt_engine.scheduler import Scheduler
from preempt_engine.sequence import Request
from preempt_engine.tokenizer import Tokenizer


@dataclass(slots=True, frozen=True)
class Arrival:
    """A request that was asked for.

    Attributes:
        request: to be queued, unless there is an error.
        builders: of its outputs, one per branch.
        recipe: what its processors are made of; None if it has none.
        error: why it can never run, or not now; None if it can.
    """

    request: Request
    builders: list[OutputBuilder]
    recipe: ProcessorRecipe | None
    error: EngineError | None


class Intake:
    """Takes requests in, for one engine between two resets.

    Args:
        config: of the engine.
        executor: has the model and its limits.
        tokenizer: None if prompts are token ids only.
        recipes: makes processors.
        scheduler: has the queue and the pool.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        tokenizer: Tokenizer | None,
        recipes: RecipeBook,
        scheduler: Scheduler,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.scheduler = scheduler
        self._executor = executor
        self._recipes = recipes
        self._num_arrived = 0

    def arrival(
        self, prompt: Prompt, params: Params, priority: int, request_id: str | None
    ) -> Arrival:
        """A request for output; see `LLM.add_request`.

        Raises:
            ConfigError: it is wrong in itself, and counts as never asked for.
        """
        self.check_priority(priority)
        request_id = self._unused_request_id(request_id)
        text, token_ids = self._tokenize(prompt)
        asked = params if isinstance(params, SamplingParams) else params.for_output
        recipe, recipe_error = self._recipe(asked)
        max_total_tokens = self.max_total_tokens(len(token_ids), params.num_sequences)
        builders = OutputBuilder.create_branches(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=token_ids,
            params=asked,
            eos_token_ids=self._executor.eos_token_ids,
            max_output_tokens=min(params.max_tokens, max_total_tokens - len(token_ids)),
            tokenizer=self.tokenizer,
        )
        error: EngineError | None = (
            self._why_infeasible(token_ids, min(params.max_tokens, 1))
            or self._why_outside_vocabulary(token_ids)
            or self._why_too_many_sequences(params, builders[0].stop_ids)
            or recipe_error
            or self._why_refused()
        )
        request = self._new_request(
            request_id,
            token_ids,
            params,
            priority=priority,
            score_from=None if asked.prompt_logprobs is None else 0,
            num_to_score=0 if asked.prompt_logprobs is None else len(token_ids) - 1,
        )
        request.max_output_tokens = builders[0].max_output_tokens
        return Arrival(request, builders, recipe, error)

    def to_score(self, prompt: Prompt, continuation: Seq[int]) -> Request | None:
        """A request for the scores of a continuation, None of an empty one; see `LLM.score`.

        Raises:
            InfeasibleRequestError: it can never run.
        """
        _, prompt_token_ids = self._tokenize(prompt)
        token_ids = [*prompt_token_ids, *continuation]
        if not continuation:
            return None
        # The logits of the last token are not wanted, so it is not computed.
        error = self._why_infeasible(token_ids[:-1]) or self._why_outside_vocabulary(token_ids)
        if error is not None:
            raise error
        return self._new_request(
            self._unused_request_id(None),
            token_ids[:-1],
            SamplingParams(temperature=0.0),
            score_from=len(prompt_token_ids) - 1,
            num_to_score=len(continuation),
        )

    def check_priority(self, priority: int) -> None:
        """Raises ConfigError for a priority that means nothing to the engine."""
        if priority != 0 and self.config.scheduling_policy != "priority":
            raise ConfigError(
                f"priority={priority}, and the engine serves in order of arrival.",
                'Build it with scheduling_policy="priority", or leave the priority at 0.',
            )

    def queue_is_full(self) -> bool:
        """Whether one more would be refused."""
        limit = self.config.max_waiting_requests
        return limit is not None and len(self.scheduler.waiting) >= limit

    def max_total_tokens(self, num_prompt_tokens: int, num_sequences: int) -> int:
        """Most tokens of each of several sequences of one prompt that have the pool to themselves.

        Full blocks of the prompt are shared; the rest of the pool is divided. The last token of a
        sequence is chosen but never computed, and the first needs no block beyond the prompt's.
        """
        num_shared = num_prompt_tokens // self.config.block_size
        num_own = (self.scheduler.blocks.num_blocks - num_shared) // num_sequences
        pool_tokens = (num_shared + num_own) * self.config.block_size + 1
        return min(self._executor.max_model_len, max(pool_tokens, num_prompt_tokens + 1))

    def _recipe(
        self, params: SamplingParams
    ) -> tuple[ProcessorRecipe | None, InfeasibleRequestError | None]:
        """What the request's processors are made of, or why they cannot be made."""
        if not params.has_processors:
            return None, None
        try:
            return self._recipes.recipe(params), None
        except InfeasibleRequestError as error:
            return None, error

    def _new_request(
        self,
        request_id: str,
        token_ids: list[int],
        params: Params,
        *,
        priority: int = 0,
        score_from: int | None = None,
        num_to_score: int = 0,
    ) -> Request:
        arrival_index = self._num_arrived
        self._num_arrived += 1
        seed = params.seed if isinstance(params, SamplingParams) else None
        if seed is None:
            seed = derive_seed(self.config.seed, arrival_index)
        return Request.create(
            request_id=request_id,
            arrival_index=arrival_index,
            prompt_token_ids=token_ids,
            params=params,
            seed=seed,
            priority=priority,
            score_from=score_from,
            num_to_score=num_to_score,
        )

    def _unused_request_id(self, request_id: str | None) -> str:
        if request_id is None:
            numbers = map(str, itertools.count(self._num_arrived))
            return next(name for name in numbers if name not in self.scheduler.requests)
        if request_id in self.scheduler.requests:
            raise ConfigError(
                f"Request id {request_id!r} is in use.", "Choose another, or leave it out."
            )
        return request_id

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if not isinstance(prompt, str):
            return None, list(prompt)
        if self.tokenizer is None:
            raise ConfigError(
                "The prompt is text, and the engine was built with skip_tokenizer_init=True.",
                "Pass token ids, or build the engine with a tokenizer.",
            )
        return prompt, self.tokenizer.encode(prompt)

    def _why_infeasible(
        self, token_ids: list[int], num_output_tokens: int = 1
    ) -> InfeasibleRequestError | None:
        """Why these tokens, and so many after them, are too many for this engine, if they are."""
        num_tokens = len(token_ids)
        pool_tokens = self.scheduler.blocks.num_blocks * self.config.block_size
        if num_tokens == 0:
            return InfeasibleRequestError("The prompt is empty.", "Give at least one token.")
        if num_tokens + num_output_tokens > self._executor.max_model_len:
            return InfeasibleRequestError(
                f"The prompt has {num_tokens} tokens and max_model_len is "
                f"{self._executor.max_model_len}, which leaves no room for output.",
                "Shorten the prompt or raise max_model_len.",
            )
        if num_tokens > pool_tokens:
            return InfeasibleRequestError(
                f"The prompt has {num_tokens} tokens and the pool holds {pool_tokens} "
                f"({self.scheduler.blocks.num_blocks} blocks of {self.config.block_size}).",
                "Shorten the prompt or raise num_kv_blocks.",
            )
        return None

    def _why_outside_vocabulary(self, token_ids: list[int]) -> InfeasibleRequestError | None:
        vocab_size = self._executor.vocab_size
        for position, token_id in enumerate(token_ids):
            if not 0 <= token_id < vocab_size:
                return InfeasibleRequestError(
                    f"Token id {token_id} at position {position} is not in [0, {vocab_size}).",
                    "Use the model's own tokenizer.",
                )
        return None

    def _why_too_many_sequences(
        self, params: Params, stop_ids: frozenset[int]
    ) -> InfeasibleRequestError | None:
        name = "n" if isinstance(params, SamplingParams) else "beam_width"
        if params.num_sequences > self.config.max_num_seqs:
            return InfeasibleRequestError(
                f"{name}={params.num_sequences} sequences of one request never run at once with "
                f"max_num_seqs={self.config.max_num_seqs}.",
                f"Lower {name} or raise max_num_seqs.",
            )
        if isinstance(params, SamplingParams):
            return None
        num_candidates = BeamSearch.num_candidates(params.beam_width, stop_ids)
        if num_candidates > self._executor.vocab_size:
            return InfeasibleRequestError(
                f"beam_width={params.beam_width} with {len(stop_ids)} stop ids needs "
                f"{num_candidates} tokens to choose from; the vocabulary has "
                f"{self._executor.vocab_size}.",
                "Lower beam_width.",
            )
        return None

    def _why_refused(self) -> QueueFullError | None:
        if not self.queue_is_full():
            return None
        return QueueFullError(
            f"{len(self.scheduler.waiting)} requests wait already, and max_waiting_requests is "
            f"{self.config.max_waiting_requests}.",
            "Try again later, or raise max_waiting_requests.",
        )
