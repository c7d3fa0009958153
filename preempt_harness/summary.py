"""What is kept of a judged trial: small, plain, and sent from xdist workers to the controller."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from preempt_harness.record import Preempted, TrialRecord


class PreemptionNote(msgspec.Struct, frozen=True):
    """One preemption, as a report names it."""

    request: str
    step: int
    mode: str
    phase: str
    reason: str
    num_computed_tokens: int

    def __str__(self) -> str:
        return f"{self.request}@{self.step} {self.phase}"


class TrialSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One trial in a report.

    Attributes:
        test: node id.
        engine, model: what ran.
        num_blocks: of the pool.
        budget: "proved", "simulated" or "given".
        verdict: see `preempt_harness.verdict`.
        preemptions: all of them, in order.
        missed: actions of the plan that found no target.
        compared: what the outputs were compared with, and how much of them.
        findings: codes.
        not_observable: check -> reason.
        pairs: situation pairs that the trial covers.
        replay: the trial as a string.
        seconds: wall time of the trial and its checks, the baseline not counted.
        texts: prompts with text, shortened.
    """

    test: str
    engine: str
    model: str
    num_blocks: int
    budget: str
    verdict: str
    preemptions: list[PreemptionNote]
    missed: list[str] = []
    compared: str = ""
    findings: list[str] = []
    not_observable: dict[str, str] = {}
    pairs: list[str] = []
    replay: str = ""
    seconds: float = 0.0
    texts: list[str] = []

    def to_json(self) -> str:
        """One line of JSON."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, line: str) -> TrialSummary:
        """Inverse of `to_json`."""
        return msgspec.json.decode(line, type=cls)


def preemption_notes(record: TrialRecord) -> list[PreemptionNote]:
    """Every preemption of a record."""
    return [
        PreemptionNote(
            request=event.request,
            step=event.step,
            mode=event.mode,
            phase=event.phase,
            reason=event.reason,
            num_computed_tokens=event.num_computed_tokens,
        )
        for event in record.events
        if isinstance(event, Preempted)
    ]


def count_preemptions(summaries: Iterable[TrialSummary]) -> Counter[tuple[str, str, str]]:
    """(forced or natural, mode, phase) -> number."""
    return Counter(
        ("forced" if note.reason == "forced" else "natural", note.mode, note.phase)
        for summary in summaries
        for note in summary.preemptions
    )
