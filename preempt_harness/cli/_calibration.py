"""How far float noise moves a model's choice between two clean runs. Runs and statistics; no files.

At one position, given one history, let the margin be the log probability of the token that the run
chose less that of the best other token; in the run itself it is its top-2 gap, 0 or more. A second
run computes the same history with other shapes (batch mix, chunks, block size), and finds another
margin. The noise of the position is the absolute difference of the two. Only where the noise
exceeds the gap can the second run prefer another token, and it then loses at most the noise by the
first run's token: so one distribution bounds both the gap at which a flip is harmless and the
regret of a flipped token.

The first run decodes, and its log probabilities are those of its own steps; the second is the
session's teacher-forced score. So both ways by which a KV slot comes to be filled (decode, and
chunked prefill as after a recompute) are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import NamedTuple

import msgspec

from preempt_harness.adapters import protocol
from preempt_harness.adapters.protocol import EngineAdapter, EngineSettings, Session
from preempt_harness.budget import KVBudget
from preempt_harness.errors import HarnessError
from preempt_harness.prompts import PromptSource
from preempt_harness.record import Preempted, RequestResult, Score
from preempt_harness.tolerances import Calibration
from preempt_harness.workload import RequestSpec, SamplingSpec, Workload

# For batch mixes that a calibration does not meet; its sample of shapes is small.
FACTOR = 2.0
REPORTED_QUANTILES = (0.5, 0.9, 0.99, 0.999, 1.0)

_MAX_TOKENS = 32
_PROMPT_TOKENS = (16, 25, 31, 40, 48, 59)  # of the requests of a batch; around block boundaries
_POLL_TIMEOUT_S = 60.0


class CalibrationError(HarnessError):
    """The engine cannot be calibrated, or a run of the calibration was not clean."""


class Margins(NamedTuple):
    """One position in two clean runs, in log probability (natural logarithm)."""

    run: float
    reference: float

    @property
    def noise(self) -> float:
        return abs(self.run - self.reference)

    @property
    def flipped(self) -> bool:
        return self.reference < 0


class Measurement(NamedTuple):
    """All positions, versions of the libraries that computed them, and what they ran on.

    `placement` is "dtype" and "device" as the sessions say: by these a tolerance is found again.
    """

    margins: list[Margins]
    versions: dict[str, str]
    placement: dict[str, str]


class Mix(NamedTuple):
    """Shapes that leave the mathematics alone and change the order of additions."""

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int


RUN_MIXES = (Mix(256, 2048, 16), Mix(1, 2048, 8), Mix(3, 19, 4))
REFERENCE_MIXES = (Mix(256, 2048, 16), Mix(256, 7, 5))

SessionOpener = Callable[[EngineSettings], Session]


def measure(
    adapter: EngineAdapter,
    settings: EngineSettings,
    num_positions: int,
    open_session: SessionOpener,
) -> Measurement:
    """Margins of `num_positions` positions or a few more, spread over all pairs of mixes.

    Args:
        adapter: of the engine.
        settings: model, dtype, seed and options; shapes are set here.
        num_positions: at least so many.
        open_session: opens sessions.

    Raises:
        CalibrationError: the engine lacks scores or log probabilities, claims batch invariance,
            was preempted although it had room, or failed.
    """
    lacking = sorted({protocol.SCORE, protocol.LOGPROBS} - adapter.capabilities)
    if lacking:
        raise CalibrationError(
            f"Engine {adapter.name!r} cannot be calibrated: it lacks {', '.join(lacking)}.",
            "Only exact equality can be asked of its outputs.",
        )
    per_batch = len(_PROMPT_TOKENS) * _MAX_TOKENS
    batches = _batches(adapter, settings, math.ceil(num_positions / per_batch))
    found = Measurement([], {}, {})
    for index, mix in enumerate(RUN_MIXES):
        own = batches[index :: len(RUN_MIXES)]
        if own:
            with _opened(adapter, _with(settings, mix, adapter), own, open_session) as session:
                results = _decode(session, own)
                found.versions.update(session.info.versions)
                found.placement.update(_placement(session))
            found.margins.extend(_compare(adapter, settings, own, results, open_session))
    return found


def calibration_of(
    measurement: Measurement, quantile: float, settings: EngineSettings, engine: str, device: str
) -> Calibration:
    """The tolerance that a measurement leads to.

    Args:
        measurement: at least one position.
        quantile: of the noise, in (0, 1].
        settings: what was measured.
        engine, device: likewise.
    """
    margins = measurement.margins
    noise = sorted(item.noise for item in margins)
    flips = [item for item in margins if item.flipped]
    bound = FACTOR * at_quantile(noise, quantile)
    return Calibration(
        engine=engine,
        model=settings.model,
        dtype=settings.dtype,
        device=device,
        gap=max([bound, *(item.run for item in flips)]),
        regret=max([bound, *(-item.reference for item in flips)]),
        num_positions=len(margins),
        quantile=quantile,
        factor=FACTOR,
        noise={
            f"{share:g}": float(f"{at_quantile(noise, share):.4g}") for share in REPORTED_QUANTILES
        },
        num_flips=len(flips),
        versions=measurement.versions,
    )


def at_quantile(ordered: Sequence[float], quantile: float) -> float:
    """The smallest value that at least this share of them does not exceed; no interpolation."""
    return ordered[max(0, math.ceil(quantile * len(ordered)) - 1)]


def decode_margin(token_id: int, logprobs: dict[int, float]) -> float:
    """The chosen token's margin by the log probabilities that were delivered with it."""
    others = [value for other, value in logprobs.items() if other != token_id]
    if token_id not in logprobs or not others:
        raise CalibrationError(
            f"Log probabilities for token {token_id} name {sorted(logprobs)} only.",
            "The adapter must deliver the chosen token and the best other one (logprobs=2).",
        )
    return logprobs[token_id] - max(others)


def score_margin(score: Score) -> float:
    """The same token's margin in the reference; negative where another token is better there."""
    best_other = score.second_logprob if score.token_id == score.top_token_id else score.top_logprob
    return score.logprob - best_other


def _batches(adapter: EngineAdapter, settings: EngineSettings, number: int) -> list[Workload]:
    has_text = adapter.encode(settings, "text") is not None
    prompts = PromptSource(
        adapter.vocab_size(settings),
        settings.seed,
        (lambda text: adapter.encode(settings, text)) if has_text else None,
    )
    sampling = SamplingSpec(max_tokens=_MAX_TOKENS, ignore_eos=True, logprobs=2)
    ids = (f"r{index}" for index in count())
    return [
        Workload(
            requests=[
                RequestSpec(id=next(ids), prompt_token_ids=prompts.take(length), sampling=sampling)
                for length in _PROMPT_TOKENS
            ]
        )
        for _ in range(number)
    ]


def _with(settings: EngineSettings, mix: Mix, adapter: EngineAdapter) -> EngineSettings:
    block_size = mix.block_size
    if adapter.block_sizes:
        block_size = min(adapter.block_sizes, key=lambda size: abs(size - mix.block_size))
    return msgspec.structs.replace(
        settings,
        max_num_seqs=mix.max_num_seqs,
        max_num_batched_tokens=mix.max_num_batched_tokens,
        block_size=block_size,
        enable_prefix_caching=False,
        deterministic=False,
    )


def _placement(session: Session) -> dict[str, str]:
    config = session.info.config
    return {name: str(config[name]) for name in ("dtype", "device") if name in config}


@contextmanager
def _opened(
    adapter: EngineAdapter,
    settings: EngineSettings,
    batches: Sequence[Workload],
    open_session: SessionOpener,
) -> Iterator[Session]:
    """A session with room for each batch.

    Raises:
        CalibrationError: its engine claims batch invariance.
    """
    admission = adapter.admission_model(settings)
    room = max(KVBudget.roomy(batch, admission).num_blocks for batch in batches)
    session = open_session(msgspec.structs.replace(settings, num_blocks=room))
    try:
        if session.info.batch_invariant:
            raise CalibrationError(
                f"Engine {adapter.name!r} with model {settings.model!r} claims batch invariance.",
                "There is no noise to measure: its outputs are compared for exact equality.",
            )
        yield session
    finally:
        session.close()


def _decode(session: Session, batches: Sequence[Workload]) -> dict[str, RequestResult]:
    """Run the batches one after another, each with room."""
    for batch in batches:
        for request in batch.requests:
            session.submit(request)
        while session.unfinished():
            if any(isinstance(event, Preempted) for event in session.poll(_POLL_TIMEOUT_S)):
                raise CalibrationError(
                    "A run of the calibration was preempted although it had room.",
                    "Repair the adapter's admission model first.",
                )
    results = session.results()
    for name, result in results.items():
        if result.error or not result.finished:
            raise CalibrationError(
                f"Request {name} of the calibration failed: {result.error or 'unfinished'}.",
                "Run the suite with this model first.",
            )
    return results


def _compare(
    adapter: EngineAdapter,
    settings: EngineSettings,
    batches: Sequence[Workload],
    results: dict[str, RequestResult],
    open_session: SessionOpener,
) -> Iterator[Margins]:
    """Score every output under one of the references, in turn."""
    requests = [request for batch in batches for request in batch.requests]
    for index, mix in enumerate(REFERENCE_MIXES):
        shapes = _with(settings, mix, adapter)
        with _opened(adapter, shapes, batches, open_session) as session:
            for request in requests[index :: len(REFERENCE_MIXES)]:
                output = results[request.id].outputs[0]
                scores = session.score(request.prompt_token_ids, output.token_ids)
                for score, logprobs in zip(scores, output.logprobs or [], strict=True):
                    yield Margins(decode_margin(score.token_id, logprobs), score_margin(score))
