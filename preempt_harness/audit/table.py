"""The audit as text, Markdown or JSON."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

import msgspec

from preempt_harness.audit.kill import Audit, AuditRow, Kill, Outcome

_LISTED_CODES = 2


def as_json(audit: Audit) -> str:
    """Everything, machine readable."""
    return msgspec.json.format(msgspec.json.encode(audit), indent=1).decode()


def as_text(audit: Audit) -> str:
    """A table for a terminal, controls first, figures last."""
    rows = [["fault", *(_heading(audit, method) for method in audit.methods), "shrunk"]]
    rows.append(["(no fault)", *(_cell(audit.controls[m], ()) for m in audit.methods), ""])
    rows += [_cells(audit, row) for row in audit.rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([*lines, "", *figures(audit)])


def as_markdown(audit: Audit) -> str:
    """The same as a Markdown table, with mechanisms."""
    head = ["fault", "mechanism", *(_heading(audit, method) for method in audit.methods), "shrunk"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    controls = (_cell(audit.controls[method], ()) for method in audit.methods)
    lines.append(f"| none (control) | | {' | '.join(controls)} | |")
    for row in audit.rows:
        name, *cells = _cells(audit, row)
        source = f"[{row.mechanism}]({row.source})" if "://" in row.source else row.mechanism
        lines.append(f"| `{name}` | {source} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"- {figure}" for figure in figures(audit))])


def figures(audit: Audit) -> Iterator[str]:
    """Sums, a line each."""
    total = len(audit.rows)
    for method in audit.methods:
        kills = [row.kills[method] for row in audit.rows]
        found = [kill for kill in kills if kill.outcome is Outcome.KILLED]
        text = f"{method}: {len(found)} of {total} found"
        if found:
            seconds = [kill.cpu_s for kill in found]
            text += (
                f"; CPU seconds to the first finding: median {median(seconds):.2f}, "
                f"most {max(seconds):.1f}; trials: median {median(k.num_trials for k in found):g}, "
                f"most {max(kill.num_trials for kill in found)}"
            )
        yield text
        shrunk = [kill for kill in found if kill.shrunk_requests >= 0]
        if shrunk:
            yield (
                f"{method}, after shrinking: median {median(k.shrunk_requests for k in shrunk):g} "
                f"requests, {median(k.shrunk_preemptions for k in shrunk):g} preemptions, "
                f"{median(k.shrunk_tokens for k in shrunk):g} tokens"
            )
    missed = audit.problems()
    yield f"{len(missed)} problems" + (":" if missed else "")
    yield from (f"  {line}" for line in missed)


def _heading(audit: Audit, method: str) -> str:
    return method if method in audit.judged else f"{method} (yardstick)"


def _cells(audit: Audit, row: AuditRow) -> list[str]:
    kills = [row.kills[method] for method in audit.methods]
    shrunk = next((kill for kill in kills if kill.shrunk_requests >= 0), None)
    size = ""
    if shrunk is not None:
        size = (
            f"{shrunk.shrunk_requests} req, {shrunk.shrunk_preemptions} pre, "
            f"{shrunk.shrunk_tokens} tok"
        )
    return [row.fault, *(_cell(kill, row.expected) for kill in kills), size]


def _cell(kill: Kill, expected: tuple[str, ...]) -> str:
    """What stands in the table for one method; "!" marks a finding of an unexpected check."""
    if kill.outcome is Outcome.CLEAN:
        return f"clean ({kill.num_trials} trials)"
    if kill.outcome is not Outcome.KILLED:
        return str(kill.outcome).lower()
    codes = list(kill.codes)
    wanted = [code for code in codes if code.startswith(expected)] if expected else []
    shown = (wanted or codes)[:_LISTED_CODES]
    mark = "" if kill.expected(expected) or not expected else " !"
    names = ", ".join(shown) or "differs"
    return f"{names}{mark} ({kill.num_trials}; {kill.cpu_s:.1f} s)"
