"""`preempt-harness replay`: one trial again, from the string that a failure printed."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from preempt_harness import record, replay
from preempt_harness.adapters.protocol import EngineAdapter, EngineSettings, Session
from preempt_harness.baseline import BaselineStore
from preempt_harness.cli import _judging
from preempt_harness.cli._engines import (
    ISOLATIONS,
    POLL_TIMEOUT_S,
    session_opener,
    usable_adapter,
)
from preempt_harness.errors import HarnessError
from preempt_harness.evidence import gather_scores
from preempt_harness.explore import replay_file
from preempt_harness.record import TrialRecord
from preempt_harness.result import TrialResult
from preempt_harness.trial import Trial, run_trial
from preempt_harness.verdict import Verdict

_GOOD = (Verdict.EQUAL, Verdict.BENIGN)


class ReplayArgumentError(HarnessError, ValueError):
    """An argument of `preempt-harness replay` is wrong."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("trial", metavar="STRING|FILE", help="replay string, or a file that has it")
    parser.add_argument("--times", type=int, default=1, help="run so often and compare records")
    parser.add_argument("--log", type=Path, metavar="FILE", help="write the record, for `check`")
    parser.add_argument(
        "--isolation", choices=ISOLATIONS, help="run in a child process or not; default: adapter's"
    )
    parser.add_argument(
        "--expect-preemption",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="a trial without a preemption is VACUOUS",
    )
    _judging.add_tolerance_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print verdict, findings and digest; 1 unless the trial is clean and repeats."""
    if arguments.times < 1:
        raise ReplayArgumentError(f"--times {arguments.times} runs nothing.", "Give 1 or more.")
    trial, expected = _trial(arguments.trial)
    adapter = usable_adapter(trial.engine)
    with session_opener(adapter, arguments.isolation) as open_session:
        records = _run(trial, adapter, open_session, arguments.times)
    first = records[0]
    if arguments.log is not None:
        _write(first, arguments.log)
    result = TrialResult.judge(
        trial=trial,
        record=first,
        admission=adapter.admission_model(trial.settings),
        tolerance=_judging.tolerance_of(first.header, arguments.tolerances),
        expect_preemption=arguments.expect_preemption,
    )
    digests = [item.digest() for item in records]
    verdict = result.verdict if len(set(digests)) == 1 else Verdict.FLAKY
    _print(result, verdict, digests)
    _print_expected(expected, result)
    return 0 if verdict in _GOOD and not result.findings else 1


def _trial(given: str) -> tuple[Trial, tuple[str, ...]]:
    """The trial, and the finding codes that a replay file expects."""
    text = _text(given)
    if text.lstrip().startswith("{"):
        content = replay_file.parse(text.encode(), given)
        return content.trial, content.expected
    return replay.decode(text), ()


def _text(given: str) -> str:
    """The replay string: `given` itself, or what the file of that name holds."""
    if given.startswith(replay.PREFIX):
        return given
    try:
        return Path(given).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ReplayArgumentError(
            f"{given[:40]!r} is neither a replay string nor a file that can be read ({error}).",
            f"Paste the whole string that the failure printed; it begins with {replay.PREFIX!r}.",
        ) from error


def _run(
    trial: Trial,
    adapter: EngineAdapter,
    open_session: Callable[[EngineSettings], Session],
    times: int,
) -> list[TrialRecord]:
    """The trial's records; the baseline is made once, scores once."""

    def run_once(wanted: Trial) -> TrialRecord:
        return run_trial(wanted, adapter, open_session=open_session, poll_timeout_s=POLL_TIMEOUT_S)

    baseline = BaselineStore(run_once).get(trial.settings, trial.workload, adapter)
    records = []
    for _ in range(times):
        records.append(run_once(trial))
        records[-1].baseline = baseline
    gather_scores(records[0], trial, adapter, open_session)
    return records


def _write(trial_record: TrialRecord, path: Path) -> None:
    try:
        record.write(trial_record, path)
    except OSError as error:
        raise ReplayArgumentError(
            f"--log {path} cannot be written: {error}.", "Choose another file."
        ) from error


def _print_expected(expected: tuple[str, ...], result: TrialResult) -> None:
    if not expected:
        return
    found = {str(finding.code) for finding in result.findings}
    missing = [code for code in expected if code not in found]
    print(f"expected {', '.join(expected)}: {'not ' + ', '.join(missing) if missing else 'found'}")


def _print(result: TrialResult, verdict: Verdict, digests: list[str]) -> None:
    header = result.record.header
    print(
        f"{verdict}: engine {header.engine}, model {header.model}, {header.num_blocks} blocks of "
        f"{header.block_size}, plan {header.plan or 'none'}"
    )
    print(f"preemptions: {', '.join(map(str, result.preemptions)) or 'none'}")
    for comparison in result.comparisons:
        if comparison.reason:
            print(f"{comparison.verdict}: {comparison.sequence}: {comparison.reason}")
    if result.verdict is Verdict.INVALID_BASELINE and result.record.baseline is not None:
        for problem in result.record.baseline.problems:
            print(f"baseline: {problem}")
    _judging.print_report(result.report)
    counts = {digest: digests.count(digest) for digest in digests}
    for digest, count in counts.items():
        print(f"record {digest} ({count} of {len(digests)} runs)")
