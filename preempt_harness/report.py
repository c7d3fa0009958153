"""The terminal summary and the report file: summaries in, text out. No engine, no judgement."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest

from preempt_harness.situations import pair_name, reachable_pairs
from preempt_harness.summary import TrialSummary, count_preemptions

_MAX_NOTES = 4  # preemptions listed per trial
_MAX_LISTED = 8  # lines of any list that may be long
_PAIR_LIST_LIMIT = 6


def write_summary(
    terminal: pytest.TerminalReporter,
    summaries: Sequence[TrialSummary],
    skips: Mapping[str, int],
) -> None:
    """Write the section "preempt_harness" at the end of a session."""
    terminal.section("preempt_harness", sep="=", bold=True)
    if terminal.verbosity > 0:
        for line in trial_table(summaries):
            terminal.write_line(line)
        terminal.write_line("")
    for line in summary_lines(summaries):
        terminal.write_line(line)
    for reason, number in sorted(skips.items(), key=lambda item: -item[1])[:_MAX_LISTED]:
        terminal.write_line(f"skipped {number}: {reason}")


def trial_table(summaries: Iterable[TrialSummary]) -> list[str]:
    """One block per trial: what was preempted, when, and what was compared."""
    lines: list[str] = []
    for summary in summaries:
        lines.append(
            f"{summary.verdict:9} {_short_id(summary.test)}  "
            f"[{summary.num_blocks} blocks, {summary.budget}]"
        )
        lines.append(f"          preempted: {_notes(summary)}")
        lines += [f"          not fired: {missed}" for missed in summary.missed]
        if summary.compared:
            lines.append(f"          compared:  {summary.compared}")
        lines += [f"          prompt:    {text}" for text in summary.texts]
    return lines


def summary_lines(summaries: Sequence[TrialSummary]) -> list[str]:
    """Totals over all trials."""
    if not summaries:
        return ["no trial was run"]
    verdicts = Counter(summary.verdict for summary in summaries)
    lines = [
        f"{len(summaries)} trials on {_engines(summaries)}: "
        + ", ".join(f"{number} {verdict}" for verdict, number in verdicts.most_common())
    ]
    lines += _preemption_lines(summaries)
    lines.append(_situation_line(summaries))
    lines += _not_observable_lines(summaries)
    lines += _slowest_lines(summaries)
    return lines


def write_json_lines(path: Path, summaries: Iterable[TrialSummary]) -> None:
    """Every summary as one line of JSON."""
    path.write_text("".join(summary.to_json() + "\n" for summary in summaries))


def explain_token_difference(op: str, left: object, right: object) -> list[str] | None:
    """Lines for a failed `==` of two lists of token ids: where they first differ.

    None when the operands are something else, so that pytest explains them itself.
    """
    if op != "==" or not (_is_token_list(left) and _is_token_list(right)):
        return None
    assert isinstance(left, list)
    assert isinstance(right, list)
    shared = min(len(left), len(right))
    position = next((i for i in range(shared) if left[i] != right[i]), shared)
    window = slice(max(0, position - 3), position + 4)
    return [
        f"token ids differ first at index {position} "
        f"(lengths {len(left)} and {len(right)}, {position} equal)",
        f"left  [{window.start}:]: {left[window]}",
        f"right [{window.start}:]: {right[window]}",
    ]


def _is_token_list(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) > 8
        and all(type(item) is int and item >= 0 for item in value)
    )


def _short_id(test: str) -> str:
    return test.rpartition("/")[2] or test


def _notes(summary: TrialSummary) -> str:
    notes = [str(note) for note in summary.preemptions[:_MAX_NOTES]]
    more = len(summary.preemptions) - len(notes)
    if more > 0:
        notes.append(f"and {more} more")
    return ", ".join(notes) or "nothing"


def _engines(summaries: Iterable[TrialSummary]) -> str:
    names = dict.fromkeys(f"{summary.engine}/{summary.model}" for summary in summaries)
    return ", ".join(names)


def _preemption_lines(summaries: Sequence[TrialSummary]) -> list[str]:
    counts = count_preemptions(summaries)
    lines = [f"preemptions: {sum(counts.values())}"]
    by_source: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    for (source, mode, phase), number in counts.items():
        by_source[source, mode][phase] = number
    for (source, mode), phases in sorted(by_source.items()):
        listed = ", ".join(f"{phase} {number}" for phase, number in sorted(phases.items()))
        lines.append(f"  {source}, {mode}: {sum(phases.values())} ({listed})")
    return lines


def _situation_line(summaries: Iterable[TrialSummary]) -> str:
    covered = {pair for summary in summaries for pair in summary.pairs}
    reachable = {pair_name(pair) for pair in reachable_pairs()}
    missing = sorted(reachable - covered)
    line = f"situation pairs: {len(reachable & covered)} of {len(reachable)} reachable"
    if missing:
        shown = "; ".join(missing[:_PAIR_LIST_LIMIT])
        more = len(missing) - _PAIR_LIST_LIMIT
        line += f"; not covered: {shown}" + (f"; and {more} more" if more > 0 else "")
    return line


def _not_observable_lines(summaries: Iterable[TrialSummary]) -> list[str]:
    reasons = Counter(
        (check, reason) for summary in summaries for check, reason in summary.not_observable.items()
    )
    return [
        f"NOT OBSERVABLE in {number} trials: {check}: {reason}"
        for (check, reason), number in reasons.most_common(_MAX_LISTED)
    ]


def _slowest_lines(summaries: Sequence[TrialSummary]) -> list[str]:
    seconds: dict[str, float] = defaultdict(float)
    for summary in summaries:
        seconds[f"{summary.engine}/{summary.model}"] += summary.seconds
    total = sum(seconds.values())
    slowest = sorted(seconds.items(), key=lambda item: -item[1])[:3]
    listed = ", ".join(f"{name} {value:.1f} s" for name, value in slowest)
    return [f"time in trials and checks: {total:.1f} s ({listed})"]
