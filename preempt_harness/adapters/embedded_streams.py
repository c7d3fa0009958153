"""Outputs of the embedded engine as its streams hand them out, beside the outputs themselves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from preempt_harness.record import StreamedOutput

if TYPE_CHECKING:
    from preempt_engine import RequestOutput
    from preempt_engine.outputs import StreamDelta
    from preempt_engine.step import SequenceKey
    from preempt_engine.stream import DeltaReader


_PERIOD = 8  # tokens, of which a reader that is slow takes one alone and the others together


class Streams:
    """Reads every output of a trial as `LLM.stream` does, by a reader that is slow now and then."""

    def __init__(self) -> None:
        self._readers: dict[str, DeltaReader] = {}
        self._deltas: dict[str, dict[int, list[StreamDelta]]] = {}
        self._late_steps: defaultdict[tuple[str, int], list[int]] = defaultdict(list)

    def read(self, output: RequestOutput) -> None:
        """Take what is new of an output, which grows in place, or leave it until later."""
        if not output.finished and len(output.outputs[0].token_ids) % _PERIOD > 1:
            return
        reader = self._readers.get(output.request_id)
        if reader is None:
            from preempt_engine.stream import DeltaReader

            reader = self._readers[output.request_id] = DeltaReader(output)
        for delta in reader.read():
            self.take(delta)

    def take(self, delta: StreamDelta) -> None:
        """One that somebody else has read."""
        of_branches = self._deltas.setdefault(delta.request_id, {})
        of_branches.setdefault(delta.index, []).append(delta)

    def forget(self, request: str) -> None:
        """Its stream was closed."""
        self._deltas.pop(request, None)

    def compare(self, given: Mapping[SequenceKey, int], returned: Iterable[RequestOutput]) -> None:
        """Note who was given tokens in a step that did not return its output.

        Args:
            given: sequence that was given tokens -> number of the step.
            returned: by the same step.
        """
        if not given:
            return
        told = {output.request_id for output in returned}
        for key, step in given.items():
            if key.request_id not in told:
                self._late_steps[key].append(step)

    def of(self, request: str) -> Mapping[int, StreamedOutput]:
        """Branch -> all its deltas together."""
        return {
            branch: StreamedOutput(
                token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
                text="".join(delta.text for delta in deltas),
                num_ends=sum(delta.finish_reason is not None for delta in deltas),
                num_logprobs=None
                if deltas[-1].logprobs is None
                else sum(len(delta.logprobs or ()) for delta in deltas),
                late_steps=self._late_steps.get((request, branch), []),
            )
            for branch, deltas in self._deltas.get(request, {}).items()
        }
