"""What a check says: findings with stable codes, and what it could not see.

Owns the data only. Knows no check; docs/findings.md explains every code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from preempt_harness.record import Header


class Code(StrEnum):
    """Stable finding codes; the part before the first dash names the check."""

    # KVSan: the first bad read or write of a sequence, by its position.
    KVSAN_USE_BEFORE_WRITE = "KVSAN-USE-BEFORE-WRITE"
    KVSAN_USE_AFTER_FREE = "KVSAN-USE-AFTER-FREE"
    KVSAN_STALE_READ = "KVSAN-STALE-READ"
    KVSAN_GAP = "KVSAN-GAP"
    KVSAN_TOKEN_MISMATCH = "KVSAN-TOKEN-MISMATCH"
    KVSAN_WRONG_SLOT = "KVSAN-WRONG-SLOT"
    KVSAN_READ_LEN = "KVSAN-READ-LEN"
    KVSAN_SHARED_WRITE = "KVSAN-SHARED-WRITE"
    KVSAN_DOUBLE_MAP = "KVSAN-DOUBLE-MAP"
    KVSAN_DOUBLE_FREE = "KVSAN-DOUBLE-FREE"
    KVSAN_ID_RANGE = "KVSAN-ID-RANGE"
    KVSAN_RANKS_DISAGREE = "KVSAN-RANKS-DISAGREE"
    KVSAN_LEAK = "KVSAN-LEAK"

    TOK_DIVERGED = "TOK-DIVERGED"
    TOK_REGRET = "TOK-REGRET"
    TOK_NO_EVIDENCE = "TOK-NO-EVIDENCE"
    TOK_LENGTH = "TOK-LENGTH"
    TOK_LOGPROBS = "TOK-LOGPROBS"

    DEL_NO_RESULT = "DEL-NO-RESULT"
    DEL_UNKNOWN = "DEL-UNKNOWN"
    DEL_TOKEN_REPEATED = "DEL-TOKEN-REPEATED"
    DEL_TOKEN_LOST = "DEL-TOKEN-LOST"
    DEL_TOKEN_CHANGED = "DEL-TOKEN-CHANGED"
    DEL_TEXT = "DEL-TEXT"
    DEL_LOGPROBS = "DEL-LOGPROBS"
    DEL_LATE = "DEL-LATE"
    DEL_FINISH_REASON = "DEL-FINISH-REASON"
    DEL_MAX_TOKENS = "DEL-MAX-TOKENS"
    DEL_MIN_TOKENS = "DEL-MIN-TOKENS"
    DEL_PAST_STOP = "DEL-PAST-STOP"

    ACC_POOL_TOTAL = "ACC-POOL-TOTAL"
    ACC_POOL_USED = "ACC-POOL-USED"
    ACC_POOL_LISTS = "ACC-POOL-LISTS"
    ACC_REF_COUNT = "ACC-REF-COUNT"
    ACC_TABLE = "ACC-TABLE"
    ACC_QUEUE = "ACC-QUEUE"
    ACC_LEAK = "ACC-LEAK"
    ACC_RESET = "ACC-RESET"
    ACC_COUNTER = "ACC-COUNTER"
    ACC_REQUEST_COUNTER = "ACC-REQUEST-COUNTER"
    ACC_WORKER_VIEW = "ACC-WORKER-VIEW"
    ACC_WORKER_TABLE = "ACC-WORKER-TABLE"
    ACC_WORKER_COPIES = "ACC-WORKER-COPIES"
    ACC_PREEMPTED_EMPTY = "ACC-PREEMPTED-EMPTY"
    ACC_PREEMPTED_KEEPS = "ACC-PREEMPTED-KEEPS"
    ACC_PREEMPTED_COUNT = "ACC-PREEMPTED-COUNT"
    ACC_PREEMPTED_SCHEDULED = "ACC-PREEMPTED-SCHEDULED"
    ACC_TOKEN_BUDGET = "ACC-TOKEN-BUDGET"
    ACC_MAX_SEQS = "ACC-MAX-SEQS"

    PROG_STEP_BOUND = "PROG-STEP-BOUND"
    PROG_LIVELOCK = "PROG-LIVELOCK"
    PROG_ORDER = "PROG-ORDER"
    PROG_INFEASIBLE = "PROG-INFEASIBLE"
    PROG_UNDUE_ERROR = "PROG-UNDUE-ERROR"
    PROG_UNFINISHED = "PROG-UNFINISHED"
    PROG_QUEUE_LIMIT = "PROG-QUEUE-LIMIT"

    WORK_RECOMPUTE = "WORK-RECOMPUTE"
    WORK_PREEMPTIONS = "WORK-PREEMPTIONS"
    WORK_VAIN = "WORK-VAIN"
    WORK_BYTES = "WORK-BYTES"
    WORK_PREDICTION = "WORK-PREDICTION"
    WORK_IDLE = "WORK-IDLE"
    WORK_CROWDED = "WORK-CROWDED"
    WORK_DRAFTS = "WORK-DRAFTS"
    WORK_CACHE_MISS = "WORK-CACHE-MISS"
    WORK_OVERRUN = "WORK-OVERRUN"

    CRASH_EXCEPTION = "CRASH-EXCEPTION"
    CRASH_SIGNAL = "CRASH-SIGNAL"
    CRASH_EXIT = "CRASH-EXIT"
    CRASH_HANG = "CRASH-HANG"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong, and where. Places that do not apply are None.

    Attributes:
        code: stable name of the kind.
        message: one or two plain sentences.
        step: the step in which it shows.
        request: the request it concerns.
        sequence: the sequence ("request.branch").
        position: token position in the sequence, counted from the first prompt token.
        block: id of the KV block.
        rank: tensor parallel rank.
    """

    code: Code
    message: str
    step: int | None = None
    request: str | None = None
    sequence: str | None = None
    position: int | None = None
    block: int | None = None
    rank: int | None = None

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """What one part of a check found.

    Attributes:
        check: the check's name, for example "accounting".
        part: the part of it, "" for a check of one part.
        findings: in the order of the record.
        not_observable: why the part could not judge, None when it did.
        counted: figures by name: what was looked at, and consequences that are not listed.
    """

    check: str
    part: str = ""
    findings: tuple[Finding, ...] = ()
    not_observable: str | None = None
    counted: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.check}/{self.part}" if self.part else self.check


def request_of(seq: str) -> str:
    """The request of a sequence "request.branch"."""
    return seq.rpartition(".")[0] or seq


def why_not_observed(header: Header, needs: frozenset[str]) -> str | None:
    """Why a check that judges from these event types cannot, None when it can."""
    missing = needs - set(header.observed)
    return f"{header.engine} does not show {', '.join(sorted(missing))}" if missing else None


class Listing:
    """Findings in order, each root cause once, and a count of what is left out.

    Args:
        limit: most findings listed of one code.
    """

    def __init__(self, limit: int = 20) -> None:
        self.findings: list[Finding] = []
        self.counted: dict[str, int] = {}
        self._limit = limit
        self._listed: dict[Code, int] = {}
        self._seen: set[tuple[Code, object]] = set()

    def add(self, finding: Finding, once: object = None) -> bool:
        """List `finding`, unless one of its code was added with the same `once` before.

        Returns:
            True when it is new, listed or not.
        """
        if once is not None:
            if (finding.code, once) in self._seen:
                return False
            self._seen.add((finding.code, once))
        listed = self._listed.get(finding.code, 0)
        self._listed[finding.code] = listed + 1
        if listed < self._limit:
            self.findings.append(finding)
        else:
            self.count(f"{finding.code} not listed")
        return True

    def report(
        self,
        code: Code,
        step: int | None,
        what: str,
        *,
        once: object = None,
        request: str | None = None,
        seq: str | None = None,
        position: int | None = None,
        block: int | None = None,
        rank: int | None = None,
    ) -> bool:
        """`add` a finding whose message is "Step S, WHO: `what`."."""
        if seq is not None:
            request = request_of(seq)
        place = [] if step is None else [f"Step {step}"]
        who = seq if seq is not None else request
        if who is not None:
            place.append(who)
        message = f"{', '.join(place)}: {what}." if place else f"{what[:1].upper()}{what[1:]}."
        finding = Finding(
            code=code,
            message=message,
            step=step,
            request=request,
            sequence=seq,
            position=position,
            block=block,
            rank=rank,
        )
        return self.add(finding, once)

    def result(self, check: str, part: str = "") -> CheckResult:
        """What a part of a check has to say."""
        return CheckResult(
            check=check, part=part, findings=tuple(self.findings), counted=dict(self.counted)
        )

    def count(self, name: str, by: int = 1) -> None:
        """Add to a figure."""
        self.counted[name] = self.counted.get(name, 0) + by
