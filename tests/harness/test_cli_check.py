"""`preempt-harness check LOG`."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from fake_engine import run_fake
from fake_trials import make_workload

from preempt_harness import record
from preempt_harness.cli.main import main
from preempt_harness.record import TrialRecord

TIGHT = {"num_blocks": 8, "block_size": 4}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "trial.jsonl"


def clean() -> TrialRecord:
    return run_fake(make_workload([5, 9, 7], max_tokens=12), **TIGHT)


def faulty() -> TrialRecord:
    return run_fake(
        make_workload([5, 9, 7], max_tokens=12), faults=frozenset({"double_free"}), **TIGHT
    )


def test_a_clean_log_passes_and_its_summary_counts_preemptions(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trial = clean()
    record.write(trial, log)
    assert main(["check", str(log)]) == 0
    num_preemptions = sum(isinstance(event, record.Preempted) for event in trial.events)
    assert num_preemptions > 0
    output = capsys.readouterr().out
    assert output.startswith(f"0 findings in {len(trial.events)} events")
    assert f"3 requests, {num_preemptions} preemptions" in output


@pytest.mark.parametrize("verify", ["incremental", "full"])
def test_a_fault_is_printed_with_its_place_and_fails(
    log: Path, verify: str, capsys: pytest.CaptureFixture[str]
) -> None:
    record.write(faulty(), log)
    assert main(["check", str(log), "--verify", verify]) == 1
    output = capsys.readouterr().out
    assert "KVSAN-DOUBLE-FREE (step " in output
    assert "block " in output


def test_a_required_check_that_cannot_judge_fails(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trial = clean()
    trial.header = msgspec.structs.replace(trial.header, observed=[])
    trial.events = []
    record.write(trial, log)
    assert main(["check", str(log), "--require", "crash"]) == 0
    assert "NOT OBSERVABLE: kvsan" in capsys.readouterr().out
    assert main(["check", str(log), "--require", "crash", "kvsan"]) == 1
    assert "required and not observable: kvsan" in capsys.readouterr().out


def test_an_unknown_required_check_is_a_usage_error(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["check", str(log), "--require", "kvasan"])
    assert "kvsan" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "No such file"),
        (b"", "empty"),
        (b"not json\n", "the first line is not a header"),
        (b'{"header":{"schema_version":99}}\n', "this release reads version"),
        (b"\xff\xfe\n", "the first line is not a header"),
    ],
)
def test_an_unreadable_log_is_one_clear_line(
    log: Path, content: bytes | None, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        log.write_bytes(content)
    assert main(["check", str(log)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"preempt-harness check: {log} cannot be read as a trial record: ")
    assert why in error
    assert error.count("\n") == 1


def test_a_damaged_line_is_named(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record.write(clean(), log)
    lines = log.read_bytes().splitlines(keepends=True)
    lines[3] = lines[3][:20] + b"\n"
    log.write_bytes(b"".join(lines))
    assert main(["check", str(log)]) == 2
    assert "line 4" in capsys.readouterr().err


def test_a_tolerance_file_that_is_none_is_refused(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record.write(clean(), log)
    assert main(["check", str(log), "--tolerances", str(log)]) == 2
    assert "preempt-harness calibrate --output FILE" in capsys.readouterr().err
