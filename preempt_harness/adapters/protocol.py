"""The one protocol between the harness and an engine. Data and method signatures; no engine.

An adapter describes an engine and opens sessions on it; a session takes requests and gives events.
One `poll` is one step of an engine that can be stepped, and whatever has arrived of one that
cannot: one protocol, not two. What an engine cannot do is missing from its capabilities, never
pretended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from preempt_harness.admission import AdmissionModel
from preempt_harness.record import AnyEvent, RequestResult, Score
from preempt_harness.workload import RequestSpec, SamplingSpec

# What a session can be asked for.
STEPPED = "stepped"  # one poll is one step, and nothing happens between polls
PREEMPT = "preempt"  # `preempt` forces a preemption
HOLD_BLOCKS = "hold_blocks"
ABORT = "abort"
SCORE = "score"
RESET_PREFIX_CACHE = "reset_prefix_cache"
RESET_RUNNING_REQUESTS = "reset_running_requests"
# What the engine does.
RECOMPUTE = "recompute"  # preempts by recompute
SWAP = "swap"  # preempts by swap
PREFIX_CACHING = "prefix_caching"
CHUNKED_PREFILL = "chunked_prefill"
MIXED_STEPS = "mixed_steps"  # a step decodes and prefills, each request as far as the budget goes
STRICT_ORDER = "strict_order"  # by priority and arrival: who is let in, who keeps its blocks
KEEPS_FREED_BLOCKS = "keeps_freed_blocks"  # found until handed out, ends of prefixes first
QUEUE_ORDER = "queue_order"  # the last let in loses its blocks first and waits in front of all
EVICTS_FOR_URGENT = "evicts_for_urgent"  # who waits takes the blocks of less urgent requests
DRAFTS_LAST = "drafts_last"  # no request loses its blocks, or waits, for a draft
SAMPLING = "sampling"  # temperature, top-k, top-p, seed
LOGPROBS = "logprobs"
STOP_STRINGS = "stop_strings"
STOP_STRINGS_BY_END = "stop_strings_by_end"  # the one that ends first, of those the longest
STOP_TOKENS = "stop_tokens"
MIN_TOKENS = "min_tokens"
EOS = "eos"  # `ignore_eos` may be false: end-of-sequence ends a request
TEXT = "text"
BLOCK_SIZE = "block_size"  # any block size; otherwise `block_sizes` of the adapter
BLOCK_REUSE_ORDER = "block_reuse_order"
POOL_LIMIT = "pool_limit"  # a request that has filled the pool ends, as at max_model_len
WATERMARK = "watermark"
MAX_MODEL_LEN = "max_model_len"
STATE_CHECK = "state_check"  # option debug_worker_state: workers compare with the scheduler
POISON = "poison"
TENSOR_PARALLEL = "tensor_parallel"
OWN_LOOP = "own_loop"  # option call="generate" or "stream": calls of the engine run the steps
INLINE_RANKS = "inline_ranks"  # option worker_processes=False: the exact model's start at once
PRIORITY = "priority"  # `scheduling_policy`
SET_PRIORITY = "set_priority"  # of an unfinished request
PARALLEL_SAMPLING = "parallel_sampling"  # several outputs of one prompt: `n`
BEAM_SEARCH = "beam_search"
QUEUE_LIMIT = "queue_limit"
PROMPT_LOGPROBS = "prompt_logprobs"
PENALTIES = "penalties"  # repetition, presence, frequency
LOGIT_BIAS = "logit_bias"
BAD_WORDS = "bad_words"
LOGITS_PROCESSORS = "logits_processors"
STRUCTURED_OUTPUTS = "structured_outputs"  # JSON schema and regular expression
PROMPT_ONLY = "prompt_only"  # `max_tokens` of 0
ASYNC_SCHEDULING = "async_scheduling"  # steps decided ahead of the one that runs
SPECULATION = "speculation"  # `speculative_config`; the methods are the engine's

CAPABILITIES = frozenset(
    {
        STEPPED,
        PREEMPT,
        HOLD_BLOCKS,
        ABORT,
        SCORE,
        RESET_PREFIX_CACHE,
        RESET_RUNNING_REQUESTS,
        RECOMPUTE,
        SWAP,
        PREFIX_CACHING,
        CHUNKED_PREFILL,
        MIXED_STEPS,
        STRICT_ORDER,
        KEEPS_FREED_BLOCKS,
        QUEUE_ORDER,
        EVICTS_FOR_URGENT,
        DRAFTS_LAST,
        SAMPLING,
        LOGPROBS,
        STOP_STRINGS,
        STOP_STRINGS_BY_END,
        STOP_TOKENS,
        MIN_TOKENS,
        EOS,
        TEXT,
        BLOCK_SIZE,
        BLOCK_REUSE_ORDER,
        POISON,
        POOL_LIMIT,
        WATERMARK,
        MAX_MODEL_LEN,
        STATE_CHECK,
        TENSOR_PARALLEL,
        INLINE_RANKS,
        OWN_LOOP,
        PRIORITY,
        SET_PRIORITY,
        PARALLEL_SAMPLING,
        BEAM_SEARCH,
        QUEUE_LIMIT,
        PROMPT_LOGPROBS,
        PENALTIES,
        LOGIT_BIAS,
        BAD_WORDS,
        LOGITS_PROCESSORS,
        STRUCTURED_OUTPUTS,
        PROMPT_ONLY,
        ASYNC_SCHEDULING,
        SPECULATION,
    }
)


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a trial asks of an engine's configuration. Plain data.

    Attributes:
        model: "exact", a tiny model's name, "smollm2", a path or a hub id.
        num_blocks: KV blocks of the pool.
        block_size: tokens per block.
        max_num_batched_tokens: token budget of a step.
        max_num_seqs: most requests that run at once.
        max_model_len: most tokens of a request; None takes the model's limit.
        scheduling_policy: "fcfs", or "priority" (needs `PRIORITY`).
        max_waiting_requests: most requests in the waiting queue when one arrives (needs
            `QUEUE_LIMIT`); None sets no limit.
        watermark: share of the pool that admission leaves free.
        enable_prefix_caching: whether full blocks can be found again.
        speculative_config: how tokens are drafted ahead, in vLLM's form, with "method" and
            "num_speculative_tokens" (needs `SPECULATION`); None drafts nothing. Baselines are
            always run without: drafts must not change an output.
        async_scheduling: steps decided ahead of the one that runs (needs `ASYNC_SCHEDULING`).
            Baselines are always run with 0.
        seed: of the engine.
        tensor_parallel_size: number of ranks.
        deterministic: ask for bitwise equal logits where the engine can.
        dtype: of weights and cache, "auto" for the engine's default.
        options: more of this engine's own options.
    """

    model: str = "exact"
    num_blocks: int
    block_size: int = 16
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    max_model_len: int | None = None
    scheduling_policy: str = "fcfs"
    max_waiting_requests: int | None = None
    watermark: float = 0.0
    enable_prefix_caching: bool = True
    speculative_config: dict[str, Any] | None = None
    async_scheduling: int = 0
    seed: int = 0
    tensor_parallel_size: int = 1
    deterministic: bool = True
    dtype: str = "auto"
    options: dict[str, Any] = {}


class SessionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a session says of itself; goes into the record's header.

    Attributes:
        config: the engine's configuration as it was passed, plain data.
        block_size, num_blocks: of the pool as it really is.
        vocab_size: 0 if unknown.
        eos_token_ids: of end-of-sequence, none if unknown.
        num_ranks: tensor parallel size.
        versions: library -> version.
        observed: names of the event types this session emits.
        batch_invariant: logits are bitwise equal under any batch mix, by the engine's claim.
        max_total_tokens: most tokens of one request, by model and pool.
    """

    config: dict[str, Any]
    block_size: int
    num_blocks: int
    vocab_size: int = 0
    eos_token_ids: list[int] = []
    num_ranks: int = 1
    versions: dict[str, str] = {}
    observed: list[str] = []
    batch_invariant: bool = False
    max_total_tokens: int | None = None


class Session(Protocol):
    """One run of an engine. Requests are named as in the workload."""

    @property
    def info(self) -> SessionInfo: ...

    def submit(self, request: RequestSpec) -> None:
        """Hand a request to the engine. A request it refuses ends with a result, not an error."""
        ...

    def abort(self, request: str) -> None:
        """Give a request up; needs `ABORT`."""
        ...

    def poll(self, timeout_s: float) -> Sequence[AnyEvent]:
        """Run one step (`STEPPED`), or wait for at most `timeout_s`; returns what happened.

        Raises:
            Exception: whatever the engine raises; the trial turns it into an `EngineError` event.
        """
        ...

    def unfinished(self) -> bool:
        """True while a submitted request has not ended."""
        ...

    def results(self) -> dict[str, RequestResult]:
        """What each submitted request has given so far."""
        ...

    def close(self) -> Sequence[AnyEvent]:
        """Release everything; returns last events, such as the final `PoolState`. Once."""
        ...

    def preempt(self, request: str, mode: str) -> None:
        """Preempt before the next step; needs `PREEMPT`."""
        ...

    def hold_blocks(self, num_blocks: int) -> int:
        """Withhold free blocks, 0 gives all back; returns how many; needs `HOLD_BLOCKS`."""
        ...

    def reset_prefix_cache(self) -> None:
        """Forget cached content; needs `RESET_PREFIX_CACHE`."""
        ...

    def reset_running_requests(self) -> None:
        """Preempt all that run, then forget cached content; needs `RESET_RUNNING_REQUESTS`."""
        ...

    def set_priority(self, request: str, priority: int) -> None:
        """Give an unfinished request another priority; needs `SET_PRIORITY`."""
        ...

    def score(self, prompt: Sequence[int], continuation: Sequence[int]) -> list[Score]:
        """Teacher-forced scores of a continuation; needs `SCORE`."""
        ...


class StreamingSession(Session, Protocol):
    """A session that can hand over events while a step runs; offering it is optional.

    Used in a child process, where the events of a step that kills the process are lost otherwise.
    """

    def stream_to(self, sink: Callable[[Sequence[AnyEvent]], None]) -> None:
        """Called once, after the session was opened.

        From then on events may go to `sink` at any moment of a `poll`, best before the step is
        launched; `poll` returns those that did not. Together they keep their order.
        """
        ...


class KnownIssue(msgspec.Struct, frozen=True, kw_only=True):
    """A fault of an engine that is known: a strict expected failure.

    Attributes:
        code: the finding's code.
        scenario: name of the scenario, or a glob of names.
        versions: the engine's versions that have it, as text.
        link: where it is reported or written up.
    """

    code: str
    scenario: str
    versions: str
    link: str


@runtime_checkable
class KeepsEngines(Protocol):
    """An adapter that keeps engines between sessions, because starting them takes long."""

    def kept_process_ids(self) -> frozenset[int]:
        """Processes of engines that wait for the next session; no leak of a test."""
        ...

    def close_kept(self) -> None:
        """Close engines that wait for the next session."""
        ...


class EngineAdapter(Protocol):
    """What the harness knows of an engine before it runs.

    Attributes:
        name: id on the command line.
        capabilities: what sessions can be asked for and what the engine does.
        models: model names that make sense here; the first is the default.
        block_sizes: block sizes it can run with; empty for any.
        isolation: "process" when sessions should run in a child process, else "none".
        known_issues: expected failures.
    """

    name: str
    capabilities: frozenset[str]
    models: tuple[str, ...]
    block_sizes: tuple[int, ...]
    isolation: str
    known_issues: tuple[KnownIssue, ...]

    def admission_model(self, settings: EngineSettings) -> AdmissionModel:
        """How the engine admits and preempts under these settings; the budget is solved with it."""
        ...

    def vocab_size(self, settings: EngineSettings) -> int:
        """Tokens in the model's vocabulary, known without building the engine."""
        ...

    def encode(self, settings: EngineSettings, text: str) -> list[int] | None:
        """Token ids of real text, or None when the model has no use for text."""
        ...

    def missing(self) -> str | None:
        """What to install to use this engine, in one line; None when it can be used."""
        ...

    def open(self, settings: EngineSettings) -> Session:
        """Build the engine and open a session on it.

        Raises:
            ImportError, or the engine's own errors, for settings it cannot honour.
        """
        ...


@runtime_checkable
class DerivesBranches(Protocol):
    """An adapter whose engine gives each branch of a request what a request of its own would get.

    Optional, for baselines of kind "solo".
    """

    def branch_sampling(self, sampling: SamplingSpec, branch: int) -> SamplingSpec | None:
        """Parameters with which a request of one output gives the output of one branch.

        Args:
            sampling: parameters with `n` above 1, and a seed unless they are greedy.
            branch: index of the branch.

        Returns:
            The parameters, or None where the engine has no such rule.
        """
        ...


@runtime_checkable
class KnowsOutputs(Protocol):
    """An adapter that can tell a model's greedy output without running the engine.

    Optional, for workloads in which a prompt goes on where another request's output is.
    """

    def greedy_output(
        self, settings: EngineSettings, prompt_token_ids: Sequence[int], max_tokens: int
    ) -> list[int] | None:
        """So many tokens that follow the prompt; None where this model's are not known."""
        ...


@runtime_checkable
class DecodesTokens(Protocol):
    """An adapter that can say what token ids are as text without running the engine.

    Optional, for the check of texts: without it they are compared with each other only.
    """

    def decode(self, settings: EngineSettings, token_ids: Sequence[int]) -> str | None:
        """Text of all the ids at once, as the engine is to give it for an output.

        Special tokens are left out where the engine leaves them out; U+FFFD stands for bytes that
        are no UTF-8.

        Returns:
            The text, or None where there is no tokenizer, an id is none of the vocabulary's, or
            the pieces of a text that comes token by token need not add up to it.
        """
        ...


@runtime_checkable
class RefusesSettings(Protocol):
    """An adapter whose engine takes only some values or combinations of what it is capable of.

    Optional; without it what an engine refuses shows when a session is opened.
    """

    def refusal(self, settings: EngineSettings) -> str | None:
        """What of the settings the engine cannot honour, in a few words; None when nothing."""
        ...


def refusal_of(adapter: EngineAdapter, settings: EngineSettings) -> str | None:
    """What of the settings an adapter is known to refuse; None when nothing is known."""
    return adapter.refusal(settings) if isinstance(adapter, RefusesSettings) else None
