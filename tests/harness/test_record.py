"""The trial record: written, read back, refused by name, hashed, and documented."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from fake_engine import run_fake
from fake_trials import make_workload

from preempt_harness import record as schema
from preempt_harness.record import (
    COUNTER_NAMES,
    PHASES,
    AnyEvent,
    EngineError,
    Finished,
    RecordFormatError,
    Score,
    TrialRecord,
    event_names,
    from_lines,
    read,
    to_lines,
    write,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "trial-record.md"


@pytest.fixture
def record() -> TrialRecord:
    made = run_fake(make_workload([6, 9], max_tokens=6), num_blocks=8, num_ranks=2)
    made.scores["r0"] = [Score(1, -0.5, 1, -0.5, -2.0)]
    return made


def test_record_is_read_back_as_it_was_written(record: TrialRecord, tmp_path: Path) -> None:
    write(record, tmp_path / "trial.jsonl")
    back = read(tmp_path / "trial.jsonl")
    assert back == record
    assert back.digest() == record.digest()


def test_empty_lines_are_skipped(record: TrialRecord) -> None:
    lines = [part for line in to_lines(record) for part in (line, b"", b"  ")]
    assert from_lines(lines) == record


def test_digest_leaves_out_versions_and_what_names_a_machine(record: TrialRecord) -> None:
    before = record.digest()
    record.header = msgspec.structs.replace(record.header, versions={"torch": "9"})
    assert record.digest() == before
    record.events.append(EngineError(9, "exit", "process 1234", "/home/somebody"))
    here = record.digest()
    record.events[-1] = EngineError(9, "exit", "process 99", "/root")
    assert record.digest() == here != before


def test_digest_changes_with_one_event(record: TrialRecord) -> None:
    before = record.digest()
    record.events.append(Finished(99, "r0", "stop"))
    assert record.digest() != before


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "log: empty"),
        ([b"not json"], "log: the first line is not a header"),
        ([b'{"event": {"event": "step_done", "step": 1}}'], "first line is not a header"),
        ([b'{"header": {"schema_version": 99}}'], "schema version 99; this release reads"),
        ([b'{"header": {"schema_version": 1}}'], "schema version 1; this release reads version 2"),
        ([b'{"header": {"schema_version": 2}}'], "log, line 1: .*missing required field"),
    ],
)
def test_what_is_no_record_is_refused_with_the_reason(lines: list[bytes], message: str) -> None:
    with pytest.raises(RecordFormatError, match=message):
        from_lines(lines, "log")


def test_broken_line_is_named(record: TrialRecord) -> None:
    lines = list(to_lines(record))
    lines[4] = b'{"event": {"event": "scheduled", "step": "zero"}}'
    with pytest.raises(RecordFormatError, match="log, line 5"):
        from_lines(lines, "log")


# The document -------------------------------------------------------------------------------------


def documented_events() -> dict[str, set[str]]:
    """Event -> fields, from the document's tables of three columns."""
    found = {}
    for line in DOCUMENT.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 3:
            (name,) = re.findall(r"`(\w+)`", cells[0])
            found[name] = set(re.findall(r"`(\w+)`", cells[1]))
    return found


def test_document_names_every_event_and_its_fields() -> None:
    expected = {
        event.__name__: set(event.__struct_fields__) - {"step"} for event in get_args(AnyEvent)
    }
    assert documented_events() == expected


def test_document_names_every_field_of_the_rest() -> None:
    text = DOCUMENT.read_text()
    for name in ("Header", "RequestResult", "SequenceOutput", "Baseline", "Score"):
        for field in getattr(schema, name).__struct_fields__:
            assert f"`{field}`" in text, f"{name}.{field}"


def test_document_names_every_phase_and_counter() -> None:
    text = DOCUMENT.read_text()
    assert all(f"`{name}`" in text for name in (*PHASES, *COUNTER_NAMES))


def test_every_event_class_of_the_schema_is_an_event_of_the_record() -> None:
    classes = {
        name
        for name, value in vars(schema).items()
        if isinstance(value, type) and issubclass(value, schema.Event) and value is not schema.Event
    }
    assert classes == event_names()
