"""The trial record: everything the checks may look at, and nothing else.

Owns the schema (docs/trial-record.md) and its JSON lines form. Knows no engine and no check. A
record is read back exactly as it was written, so a check judges a live trial and a log alike.

Sequences are named "request.branch", for example "r1.0". Steps count from 0; events that belong
to no step (an arrival between steps) carry the next step's number.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec

SCHEMA_VERSION = 2


def _snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Event(msgspec.Struct, frozen=True, gc=False, tag_field="event", tag=_snake_case):
    """Base of all events. `step` is the step during, or before, which it happened.

    Plain data without cycles, so the garbage collector need not look at them.
    """

    step: int


# Scheduler's view ---------------------------------------------------------------------------------


class Arrived(Event, frozen=True):
    """A request entered the engine."""

    request: str
    prompt_token_ids: list[int]
    max_tokens: int
    priority: int = 0


class PriorityChanged(Event, frozen=True):
    """An unfinished request was given another priority; lower is more urgent."""

    request: str
    priority: int


class CacheReset(Event, frozen=True):
    """Cached content was to be forgotten, and the engine did not decline.

    `running`: all that ran were to be preempted for it.
    """

    running: bool = False


class Scheduled(Event, frozen=True):
    """The scheduler decided that the step computes positions [start, end) of a sequence."""

    seq: str
    start: int
    end: int


class BlocksAllocated(Event, frozen=True):
    """Blocks appended to a sequence's table; the first `num_cached` of them are prefix hits.

    A block that replaces the last one (copy-on-write) is allocated before that one is freed.
    """

    seq: str
    blocks: list[int]
    num_cached: int = 0


class BlocksReplaced(Event, frozen=True):
    """Entries of a sequence's table now name other blocks, which hold the same tokens already.

    One reference to each old block is given up, and one to each new one taken.
    """

    seq: str
    indices: list[int]
    blocks: list[int]


class BlocksFreed(Event, frozen=True):
    """A sequence gave up one reference to each of these blocks."""

    seq: str
    blocks: list[int]


class BlocksCopied(Event, frozen=True):
    """The scheduler ordered whole-block copies (source, destination), before the step computes."""

    pairs: list[tuple[int, int]]


class Forked(Event, frozen=True):
    """A branch was split off; it shares its parent's blocks."""

    parent: str
    child: str


class TokensChosen(Event, frozen=True):
    """A beam goes on with these tokens; the user gets none before its search has ended."""

    seq: str
    token_ids: list[int]


class SwappedOut(Event, frozen=True):
    """Device blocks were ordered out to host blocks: pairs (device, host)."""

    request: str
    pairs: list[tuple[int, int]]


class SwappedIn(Event, frozen=True):
    """Host blocks were ordered back to device blocks: pairs (host, device)."""

    request: str
    pairs: list[tuple[int, int]]


class Preempted(Event, frozen=True):
    """A request that held blocks lost them before it finished.

    `mode` is "recompute" or "swap"; `phase` one of `PHASES`; `reason` "out_of_blocks", "priority"
    (for a more urgent request) or "forced" (or what a foreign engine says). `seq` is the one branch
    that lost its blocks, where an engine preempts branches one by one; "" means all of them.
    """

    request: str
    mode: str
    phase: str
    reason: str
    num_computed_tokens: int
    num_tokens: int
    seq: str = ""


class Resumed(Event, frozen=True):
    """A preempted request runs again, `num_cached_tokens` of it found in the prefix cache.

    `seq` as in `Preempted`.
    """

    request: str
    num_cached_tokens: int
    seq: str = ""


class Finished(Event, frozen=True):
    """A request ended: "stop", "length" or "error"."""

    request: str
    reason: str


class Aborted(Event, frozen=True):
    """A request was aborted from outside."""

    request: str


class PoolCounts(Event, frozen=True):
    """Sizes of the pool's parts as the engine holds them, after the step's update."""

    num_blocks: int
    free: int
    cached: int
    used: int
    held: int = 0
    fenced: int = 0


class PoolState(Event, frozen=True):
    """Raw content of the pool and the queues; an outside accountant recomputes everything.

    `ref_counts` has the references of every block, by block id, [num_blocks]. `host_blocks` is
    request -> host blocks with its content, for requests that are swapped out.
    """

    num_blocks: int
    free: list[int]
    cached: list[int]
    held: list[int]
    fenced: list[int]
    ref_counts: list[int]
    tables: dict[str, list[int]]
    waiting: list[str]
    running: list[str]
    num_host_blocks: int = 0
    host_free: list[int] = []
    host_fenced: list[int] = []
    host_blocks: dict[str, list[int]] = {}


class Counters(Event, frozen=True):
    """The engine's own totals by name, raw. Known names: `COUNTER_NAMES`."""

    values: dict[str, int]


# Worker's view ------------------------------------------------------------------------------------


class StepSent(Event, frozen=True):
    """A step's message left for a worker."""

    rank: int
    num_bytes: int


class StepLaunched(Event, frozen=True):
    """The executor began a step."""


class StepDone(Event, frozen=True):
    """The executor finished a step."""


class Computed(Event, frozen=True):
    """What a worker's attention backend was really given for one sequence.

    The block table is sent as a change: the first `table_keep` entries of the table in this rank's
    previous `Computed` of the same sequence (none before), then `table_new`.
    Slots are block * block_size + offset. Positions [0, read_len) are read.
    """

    rank: int
    seq: str
    start: int
    token_ids: list[int]
    written_slots: list[int]
    table_keep: int
    table_new: list[int]
    read_len: int


class WorkerCopied(Event, frozen=True):
    """A worker copied whole blocks (source, destination) on the device."""

    rank: int
    pairs: list[tuple[int, int]]


class WorkerSwappedOut(Event, frozen=True):
    """A worker copied device blocks to host blocks: pairs (device, host)."""

    rank: int
    pairs: list[tuple[int, int]]


class WorkerSwappedIn(Event, frozen=True):
    """A worker copied host blocks to device blocks: pairs (host, device)."""

    rank: int
    pairs: list[tuple[int, int]]


class BlocksPoisoned(Event, frozen=True):
    """A worker overwrote freed blocks."""

    rank: int
    blocks: list[int]


# Delivery -----------------------------------------------------------------------------------------


class TokensDelivered(Event, frozen=True):
    """Tokens reached the user. `logprobs` has one entry per token, if any were asked for.

    The branch in `seq` is the index of the output. The results of a beam search come whole, at its
    end.
    """

    seq: str
    token_ids: list[int]
    logprobs: list[dict[int, float]] | None = None
    text: str = ""


class EngineError(Event, frozen=True):
    """The engine raised, died or hung. `kind` is an exception's name, "signal", "exit", "hang"."""

    kind: str
    message: str
    traceback: str = ""


class PlanApplied(Event, frozen=True):
    """An action of the plan fired; `request` is what it hit, if anything single."""

    action: str
    request: str = ""


class PlanMissed(Event, frozen=True):
    """An action of the plan found its target not running; `why` says so."""

    action: str
    why: str


AnyEvent = (
    Arrived
    | PriorityChanged
    | CacheReset
    | Scheduled
    | BlocksAllocated
    | BlocksReplaced
    | BlocksFreed
    | BlocksCopied
    | Forked
    | TokensChosen
    | SwappedOut
    | SwappedIn
    | Preempted
    | Resumed
    | Finished
    | Aborted
    | PoolCounts
    | PoolState
    | Counters
    | StepSent
    | StepLaunched
    | StepDone
    | Computed
    | WorkerCopied
    | WorkerSwappedOut
    | WorkerSwappedIn
    | BlocksPoisoned
    | TokensDelivered
    | EngineError
    | PlanApplied
    | PlanMissed
)


def event_names() -> frozenset[str]:
    """Names of all event types, as a header's `observed` lists them."""
    return frozenset(event_type.__name__ for event_type in get_args(AnyEvent))


PHASES = (
    "prefill_first",  # first chunk of several done
    "prefill_middle",
    "prefill_last",  # all but the last chunk done
    "first_decode",  # prompt computed, exactly one output token known
    "decode",
    "just_resumed",  # admitted again, at most one step computed since
)

COUNTER_NAMES = (
    "num_preemptions",
    "num_recomputed_tokens",
    "num_cached_tokens",
    "num_computed_tokens",
    "num_generated_tokens",
    "num_finished_requests",
    "num_steps",
    "num_drafted_tokens",
    "num_accepted_tokens",
    "num_rejected_tokens",
    "num_copied_blocks",
    "num_swapped_out_blocks",
    "num_swapped_in_blocks",
    # Present numbers rather than totals.
    "num_running_requests",
    "num_used_blocks",
    "num_waiting_requests",
)


class StreamedOutput(msgspec.Struct, frozen=True):
    """What a user got who had one branch streamed: all deltas together.

    `num_ends` counts the deltas with a finish reason, `num_logprobs` the entries of log
    probabilities, None when the deltas have none. `late_steps` gave the branch tokens and did not
    say so to whoever ran them, so that the stream could tell of those only later.
    """

    token_ids: list[int]
    text: str
    num_ends: int
    num_logprobs: int | None = None
    late_steps: list[int] = []


class SequenceOutput(msgspec.Struct, frozen=True):
    """What the user got for one branch of one request.

    `cumulative_logprob` is the engine's own sum over the chosen tokens, `score` that by which the
    results of a beam search are ranked; None when the engine does not tell. `streamed` is what the
    engine's own way of streaming handed out of the same branch, None when it was not read.
    """

    token_ids: list[int]
    text: str = ""
    logprobs: list[dict[int, float]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    cumulative_logprob: float | None = None
    score: float | None = None
    streamed: StreamedOutput | None = None


class RequestResult(msgspec.Struct, frozen=True):
    """What the user got for one request. `finished` is False when it was cut off.

    `num_cached_tokens` (prompt tokens found in the prefix cache at the first admission) and
    `num_preemptions` are the engine's own figures, None when it does not report them.
    `prompt_logprobs` has one entry per prompt token, None for the first, if any were asked for.
    """

    outputs: list[SequenceOutput]
    finished: bool
    error: str = ""
    num_cached_tokens: int | None = None
    num_preemptions: int | None = None
    prompt_logprobs: list[dict[int, float] | None] | None = None


class Score(msgspec.Struct, frozen=True):
    """Teacher-forced score of one output token by an unpreempted reference."""

    token_id: int
    logprob: float
    top_token_id: int
    top_logprob: float
    second_logprob: float


class DecodedOutput(msgspec.Struct, frozen=True):
    """What an output's own token ids say, decoded whole by the adapter and not as they came.

    `text` is that of all tokens but a stop token that ended the output. `settled`, only where the
    request has stop strings, has one entry for each number of those tokens from 0 on: how many
    characters of `text` so many tokens make, None where they end within a character.
    """

    text: str
    settled: list[int | None] = []


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What was run. Everything here is plain data.

    Attributes:
        workload: `Workload` as builtins.
        plan: string form of the plan, "" for none.
        budget: number of blocks and its proof, as builtins.
        engine, model: adapter and model id.
        config: the engine's configuration as the adapter passed it.
        block_size, num_blocks: of the pool.
        versions: library -> version.
        capabilities: names of what the engine lets itself be asked and seen.
        observed: names of event types (`event_names`) that this adapter emits; a check whose
            input is not among them is NOT OBSERVABLE.
        batch_invariant: logits are bitwise equal under any batch mix, by the engine's own claim.
        vocab_size: of the model, 0 if unknown.
        eos_token_ids: of end-of-sequence, none if unknown.
        num_ranks: tensor parallel size.
        max_total_tokens: most tokens of one request, by model and pool; None if unknown.
    """

    schema_version: int = SCHEMA_VERSION
    workload: dict[str, Any]
    plan: str = ""
    budget: dict[str, Any] = {}
    engine: str
    model: str
    config: dict[str, Any] = {}
    block_size: int
    num_blocks: int
    versions: dict[str, str] = {}
    capabilities: list[str] = []
    observed: list[str] = []
    batch_invariant: bool = False
    vocab_size: int = 0
    eos_token_ids: list[int] = []
    num_ranks: int = 1
    max_total_tokens: int | None = None


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """The unpreempted run that outputs are compared with.

    Attributes:
        kind: "same-config", "solo", "closed-form" or "transformers".
        results: request -> what it gave.
        num_preemptions: must be 0.
        problems: findings of the baseline's own checks, as text; must be empty.
        logits_top2: request -> per output token, (top - second) log probability, if known.
    """

    kind: str
    results: dict[str, RequestResult]
    num_preemptions: int = 0
    problems: list[str] = []
    logits_top2: dict[str, list[float]] = {}


class TrialRecord(msgspec.Struct, kw_only=True):
    """One trial, whole.

    `decoded` is request -> one entry for each of its outputs, None for what nobody could decode;
    empty where the adapter decodes nothing. Like scores it is no part of the digest.
    """

    header: Header
    events: list[AnyEvent] = []
    results: dict[str, RequestResult] = {}
    baseline: Baseline | None = None
    scores: dict[str, list[Score]] = {}
    decoded: dict[str, list[DecodedOutput | None]] = {}

    def digest(self) -> str:
        """Hex digest of all that must repeat when the trial is replayed.

        Library versions are left out, and of an engine error everything but its kind: tracebacks
        name paths and process ids.
        """
        hasher = hashlib.blake2b(digest_size=16)
        header = msgspec.structs.replace(self.header, versions={})
        encoder = msgspec.json.Encoder()
        hasher.update(encoder.encode(header))
        for event in self.events:
            if isinstance(event, EngineError):
                event = EngineError(step=event.step, kind=event.kind, message="")
            hasher.update(encoder.encode(event))
        hasher.update(encoder.encode(self.results))
        hasher.update(encoder.encode(self.baseline))
        return hasher.hexdigest()


class _Line(msgspec.Struct, kw_only=True, omit_defaults=True):
    header: Header | None = None
    event: AnyEvent | None = None
    result: tuple[str, RequestResult] | None = None
    baseline: Baseline | None = None
    score: tuple[str, list[Score]] | None = None
    decoded: tuple[str, list[DecodedOutput | None]] | None = None


class RecordFormatError(ValueError):
    """A log is not a trial record, or of a schema version this release does not read."""


def to_lines(record: TrialRecord) -> Iterator[bytes]:
    """The record as JSON lines without line ends: all else, in that order of the record."""
    encode = msgspec.json.Encoder().encode
    yield encode(_Line(header=record.header))
    for event in record.events:
        yield encode(_Line(event=event))
    for request, result in record.results.items():
        yield encode(_Line(result=(request, result)))
    if record.baseline is not None:
        yield encode(_Line(baseline=record.baseline))
    for request, scores in record.scores.items():
        yield encode(_Line(score=(request, scores)))
    for request, decoded in record.decoded.items():
        yield encode(_Line(decoded=(request, decoded)))


def from_lines(lines: Iterable[bytes], source: str = "record") -> TrialRecord:
    """Read what `to_lines` wrote.

    Raises:
        RecordFormatError: names the source and the line.
    """
    decoder = msgspec.json.Decoder(_Line)
    record: TrialRecord | None = None
    for number, raw in enumerate(lines, start=1):
        if not raw.strip():
            continue
        if record is None:
            _check_version(raw, source)
        try:
            line = decoder.decode(raw)
        except msgspec.DecodeError as error:
            raise RecordFormatError(f"{source}, line {number}: {error}") from error
        if record is None:
            if line.header is None:
                raise RecordFormatError(f"{source}: the first line is not a header")
            record = TrialRecord(header=line.header)
        elif line.event is not None:
            record.events.append(line.event)
        elif line.result is not None:
            record.results[line.result[0]] = line.result[1]
        elif line.baseline is not None:
            record.baseline = line.baseline
        elif line.score is not None:
            record.scores[line.score[0]] = line.score[1]
        elif line.decoded is not None:
            record.decoded[line.decoded[0]] = line.decoded[1]
    if record is None:
        raise RecordFormatError(f"{source}: empty; a trial record starts with a header line")
    return record


def _check_version(raw: bytes, source: str) -> None:
    try:
        version = msgspec.json.decode(raw)["header"]["schema_version"]
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise RecordFormatError(f"{source}: the first line is not a header") from error
    if version != SCHEMA_VERSION:
        raise RecordFormatError(
            f"{source}: schema version {version}; this release reads version {SCHEMA_VERSION}"
        )


def write(record: TrialRecord, path: Path) -> None:
    """Write the record to a file of JSON lines."""
    with path.open("wb") as file:
        for line in to_lines(record):
            file.write(line + b"\n")


def read(path: Path) -> TrialRecord:
    """Read a file of JSON lines.

    Raises:
        RecordFormatError: it is not a trial record, or of another version.
    """
    with path.open("rb") as file:
        return from_lines(file, str(path))
