"""What a batch processor hands to its users: tokens, log probabilities, ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from preempt_harness import record
from preempt_harness.adapters.listening import wrap
from preempt_harness.adapters.transformers_cb_log import BatchLog
from preempt_harness.adapters.transformers_cb_names import (
    finish_reason,
    request_name,
    sequence_name,
)
from preempt_harness.workload import RequestSpec


class DeliveryView:
    """Wraps the output router, and the cancelling of requests.

    Args:
        processor: transformers' `ContinuousBatchProcessor`.
        log: takes the events.
        best: the engine's name of a sequence -> per output token, the likeliest tokens.
    """

    def __init__(
        self, processor: Any, log: BatchLog, best: Mapping[str, list[dict[int, float]]]
    ) -> None:
        self._log = log
        self._best = best
        self._num_delivered: Counter[str] = Counter()
        self._num_ended: Counter[str] = Counter()
        wrap(processor.output_router, "deliver", self._deliver)
        wrap(processor.output_router, "deliver_batch", self._deliver_batch)
        wrap(processor.scheduler, "clear_cancelled_requests", self._cancel)

    def logprobs_of(self, output: Any, spec: RequestSpec) -> list[dict[int, float]] | None:
        """Log probabilities of an output so far, None if none were asked for.

        The engine hands over those of the chosen tokens. Where more are asked for, the others are
        read from what the model gave in the same step.
        """
        wanted = spec.sampling.logprobs
        if wanted is None:
            return None
        own: list[dict[int, float]] = [
            {token_id: logprob}
            for token_id, logprob in zip(output.generated_tokens, output.logprobs, strict=False)
        ]
        if wanted > 1:
            best = self._best.get(output.request_id, [])
            own = [seen | entry for seen, entry in zip(best, own, strict=False)]
        return own

    def _deliver(self, original: Callable[..., None], output: Any) -> None:
        self._report(output)
        original(output)

    def _deliver_batch(self, original: Callable[..., None], outputs: list[Any]) -> None:
        for output in outputs:
            self._report(output)
        original(outputs)

    def _report(self, output: Any) -> None:
        """Every output has all tokens of its sequence: what is new is what reaches the user."""
        seq, request = sequence_name(output.request_id), request_name(output.request_id)
        seen = self._num_delivered[seq]
        new = output.generated_tokens[seen:]
        spec = self._log.requests[request]
        if new:
            self._num_delivered[seq] += len(new)
            logprobs = self.logprobs_of(output, spec)
            new_logprobs = None if logprobs is None else logprobs[seen:]
            self._log.emit(record.TokensDelivered(self._log.step, seq, list(new), new_logprobs))
        if output.is_finished():
            self._num_ended[request] += 1
            if self._num_ended[request] == spec.sampling.n:
                reason = finish_reason(output, spec)
                self._log.emit(record.Finished(self._log.step, request, reason))

    def _cancel(self, original: Callable[..., list[Any]]) -> list[Any]:
        """The engine hands nothing over for a request that it cancels."""
        states = original()
        for state in states:
            request = request_name(state.request_id)
            if request not in self._log.aborted:
                self._log.emit(record.Aborted(self._log.step, request))
            self._log.aborted.setdefault(request, []).append(state.to_generation_output())
        return states
