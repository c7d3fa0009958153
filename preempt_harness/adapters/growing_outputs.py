"""Outputs of engines that hand over, again and again, everything a request has given so far.

What is new becomes `TokensDelivered`; the result is what the engine handed over last. Should an
engine change what it has handed over before, the two differ, which the delivery check finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from preempt_harness import record
from preempt_harness.record import AnyEvent, RequestResult, SequenceOutput
from preempt_harness.workload import RequestSpec

OBSERVED = ("Arrived", "Preempted", "TokensDelivered", "Finished", "Aborted")
"""Names of the events of a session that sees outputs and counters."""


@dataclass(slots=True)
class _Request:
    spec: RequestSpec
    outputs: dict[int, SequenceOutput] = field(default_factory=dict)  # by branch
    error: str = ""
    ended: bool = False
    aborted: bool = False
    num_cached: int | None = None
    prompt_logprobs: list[dict[int, float] | None] | None = None


class GrowingOutputs:
    """The requests of one session.

    Attributes:
        step: number of the poll at hand.
    """

    def __init__(self) -> None:
        self.step = 0
        self._requests: dict[str, _Request] = {}
        self._events: list[AnyEvent] = []

    def spec_of(self, request: str) -> RequestSpec:
        """What was asked for."""
        return self._requests[request].spec

    def add(self, *events: AnyEvent) -> None:
        """Append events."""
        self._events += events

    def take(self) -> list[AnyEvent]:
        """Everything since the last call."""
        events, self._events = self._events, []
        return events

    def arrived(self, spec: RequestSpec) -> None:
        """A request is about to be handed to the engine."""
        self._requests[spec.id] = _Request(spec)
        self.add(
            record.Arrived(
                step=self.step,
                request=spec.id,
                prompt_token_ids=list(spec.prompt_token_ids),
                max_tokens=spec.sampling.max_tokens,
                priority=spec.priority,
            )
        )

    def refused(self, request: str, why: str) -> None:
        """The engine does not take a request, or gives it up with an error."""
        entry = self._requests[request]
        if not entry.ended:
            entry.error, entry.ended = why, True
            self.add(record.Finished(self.step, request, "error"))

    def aborted(self, request: str) -> bool:
        """A request is given up from outside; False if it has ended, or is not known."""
        entry = self._requests.get(request)
        if entry is None or entry.ended:
            return False
        entry.aborted = entry.ended = True
        self.add(record.Aborted(self.step, request))
        return True

    def grown(self, request: str, branch: int, output: SequenceOutput) -> None:
        """One branch of a request has given this so far; what comes after its end is ignored."""
        entry = self._requests[request]
        if entry.ended:
            return
        before = entry.outputs.get(branch)
        seen = 0 if before is None else len(before.token_ids)
        text = "" if before is None else before.text
        entry.outputs[branch] = output
        new = output.token_ids[seen:]
        if new:
            logprobs = None if output.logprobs is None else output.logprobs[seen:]
            self.add(
                record.TokensDelivered(
                    self.step, f"{request}.{branch}", new, logprobs, output.text[len(text) :]
                )
            )
        reasons = [item.finish_reason for item in entry.outputs.values()]
        if len(reasons) == entry.spec.sampling.n and all(reasons):
            entry.ended = True
            self.add(record.Finished(self.step, request, output.finish_reason or ""))

    def seen_of_prompt(
        self,
        request: str,
        *,
        num_cached: int | None = None,
        logprobs: Sequence[dict[int, float] | None] | None = None,
    ) -> None:
        """What the engine says of a prompt; the first figure of cached tokens stays."""
        entry = self._requests[request]
        if entry.num_cached is None:
            entry.num_cached = num_cached
        if logprobs is not None:
            entry.prompt_logprobs = list(logprobs)

    def unfinished(self) -> bool:
        """True while a request has not ended."""
        return not all(entry.ended for entry in self._requests.values())

    def results(self) -> dict[str, RequestResult]:
        """What each request has given."""
        return {name: _result(entry) for name, entry in self._requests.items()}


def _result(entry: _Request) -> RequestResult:
    outputs = [entry.outputs[branch] for branch in sorted(entry.outputs)]
    if entry.aborted:
        outputs = [_aborted(output) for output in outputs]
    return RequestResult(
        outputs=outputs,
        finished=entry.ended,
        error=entry.error,
        num_cached_tokens=entry.num_cached,
        prompt_logprobs=entry.prompt_logprobs,
    )


def _aborted(output: SequenceOutput) -> SequenceOutput:
    return SequenceOutput(
        token_ids=output.token_ids,
        text=output.text,
        logprobs=output.logprobs,
        finish_reason=output.finish_reason or "abort",
    )
