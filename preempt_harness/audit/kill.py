"""What came of looking for faults. Plain data, and the words for it."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Outcome(StrEnum):
    """Of one method on one fault.

    KILLED         found.
    SURVIVED       its line ran, and nobody noticed.
    NOT EXERCISED  its line never ran: whatever failed, the fault was not found.
    NOT APPLIED    the code that it replaces has changed.
    CLEAN          a control: no fault, and nothing found.
    FALSE ALARM    a control: no fault, and something found all the same.
    """

    KILLED = "KILLED"
    SURVIVED = "SURVIVED"
    NOT_EXERCISED = "NOT EXERCISED"
    NOT_APPLIED = "NOT APPLIED"
    CLEAN = "CLEAN"
    FALSE_ALARM = "FALSE ALARM"


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """What one method made of one fault, or of none.

    Attributes:
        outcome: in a word.
        codes: finding codes of the first failure; empty where a plain comparison failed.
        where: test or trial that failed.
        message: the first failure in one line.
        num_trials: trials up to the first failure, or all.
        cpu_s: processor seconds up to then.
        reached: how often the faulty line ran.
        shrunk_requests, shrunk_preemptions, shrunk_tokens: size of the smallest failing trial
            that was found, -1 where nothing was shrunk; tokens are those of prompts and outputs.
        replay: the smallest failing trial as a replay string.
    """

    outcome: Outcome
    codes: tuple[str, ...] = ()
    where: str = ""
    message: str = ""
    num_trials: int = 0
    cpu_s: float = 0.0
    reached: int = 0
    shrunk_requests: int = -1
    shrunk_preemptions: int = -1
    shrunk_tokens: int = -1
    replay: str = ""

    def expected(self, beginnings: tuple[str, ...]) -> bool:
        """Whether a code begins as the fault expects; true where there are no codes."""
        return not self.codes or any(code.startswith(beginnings) for code in self.codes)


class AuditRow(msgspec.Struct, frozen=True, kw_only=True):
    """One fault.

    Attributes:
        fault, kind, mechanism, source, expected: of the fault.
        kills: by the method's name.
    """

    fault: str
    kind: str
    mechanism: str
    source: str
    expected: tuple[str, ...]
    kills: dict[str, Kill]


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """The whole table.

    Attributes:
        seed: of the search.
        methods: in order; those of `judged` must find every fault.
        judged: the others are yardsticks.
        rows: one per fault.
        controls: by the method's name, without a fault.
    """

    seed: int
    methods: tuple[str, ...]
    judged: tuple[str, ...]
    rows: list[AuditRow]
    controls: dict[str, Kill]

    def problems(self) -> list[str]:
        """Why the audit fails, a line each; empty when it passes."""
        lines = [
            f"control without a fault, {method}: {kill.outcome}: {kill.message}"
            for method, kill in self.controls.items()
            if kill.outcome is not Outcome.CLEAN and method in self.judged
        ]
        lines += [
            f"{row.fault}, {method}: {row.kills[method].outcome}"
            for row in self.rows
            for method in self.judged
            if row.kills[method].outcome is not Outcome.KILLED
        ]
        return lines
