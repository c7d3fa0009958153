"""`preempt-harness replay`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from preempt_harness import replay
from preempt_harness.adapters import registry
from preempt_harness.adapters.embedded import EmbeddedAdapter, EmbeddedSession
from preempt_harness.adapters.protocol import EngineSettings
from preempt_harness.cli.main import main
from preempt_harness.record import AnyEvent, BlocksFreed
from preempt_harness.trial import Trial
from preempt_harness.workload import RequestSpec, SamplingSpec, Workload


def trial(**changes: Any) -> Trial:
    """Three requests of the exact model; the plan preempts one of them, with room."""
    workload = Workload(
        requests=[
            RequestSpec(
                id=f"r{index}",
                prompt_token_ids=[(7 * index + position) % 60 for position in range(5 + index)],
                sampling=SamplingSpec(max_tokens=9),
            )
            for index in range(3)
        ]
    )
    given: dict[str, Any] = {
        "engine": "embedded",
        "settings": EngineSettings(num_blocks=40, block_size=4),
        "workload": workload,
        "plan": "preempt:r1@out=3",
        **changes,
    }
    return Trial(**given)


def digests(output: str) -> list[str]:
    return re.findall(r"^record ([0-9a-f]{32}) ", output, re.MULTILINE)


def test_a_clean_trial_passes_and_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", replay.encode(trial())]) == 0
    output = capsys.readouterr().out
    assert output.startswith("EQUAL: engine embedded, model exact, 40 blocks of 4, plan preempt:r1")
    assert "preemptions: r1@" in output
    assert len(digests(output)) == 1


def test_runs_of_the_same_trial_have_one_digest(capsys: pytest.CaptureFixture[str]) -> None:
    text = replay.encode(trial())
    assert main(["replay", text, "--times", "5"]) == 0
    output = capsys.readouterr().out
    assert "(5 of 5 runs)" in output
    assert main(["replay", text]) == 0
    assert digests(capsys.readouterr().out) == digests(output)


def test_a_string_in_a_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "failing.txt"
    file.write_text(replay.encode(trial()) + "\n")
    assert main(["replay", str(file)]) == 0


def test_the_record_that_is_written_passes_check(tmp_path: Path) -> None:
    log = tmp_path / "trial.jsonl"
    assert main(["replay", replay.encode(trial()), "--log", str(log)]) == 0
    assert main(["check", str(log), "--require", "kvsan", "tokens"]) == 0


def test_a_trial_without_a_preemption_is_vacuous_unless_none_is_expected(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = replay.encode(trial(plan=""))
    assert main(["replay", text]) == 1
    assert capsys.readouterr().out.startswith("VACUOUS")
    assert main(["replay", text, "--no-expect-preemption"]) == 0


def test_a_trial_runs_in_a_child_process_with_the_same_digest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = replay.encode(trial())
    assert main(["replay", text]) == 0
    here = digests(capsys.readouterr().out)
    assert main(["replay", text, "--isolation", "process"]) == 0
    assert digests(capsys.readouterr().out) == here


class ForgetfulAdapter(EmbeddedAdapter):
    """Loses what it says of freed blocks, in every second session if it is moody."""

    name = "forgetful"
    moody = False
    num_opened = 0

    def open(self, settings: EngineSettings) -> EmbeddedSession:
        type(self).num_opened += 1
        silent = not self.moody or self.num_opened % 2 == 0
        return ForgetfulSession(settings) if silent else EmbeddedSession(settings)


class MoodyAdapter(ForgetfulAdapter):
    name = "moody"
    moody = True


class ForgetfulSession(EmbeddedSession):
    def poll(self, timeout_s: float) -> Sequence[AnyEvent]:
        return [event for event in super().poll(timeout_s) if not isinstance(event, BlocksFreed)]


class EntryPoint:
    def __init__(self, name: str, loaded: object) -> None:
        self.name = name
        self._loaded = loaded

    def load(self) -> object:
        if isinstance(self._loaded, Exception):
            raise self._loaded
        return self._loaded


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("forgetful", ForgetfulAdapter),
        EntryPoint("moody", MoodyAdapter),
        EntryPoint("broken", ImportError("no module named foreign_engine")),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)


@pytest.mark.usefixtures("registered")
def test_findings_of_an_entry_points_engine_fail(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", replay.encode(trial(engine="forgetful"))]) == 1
    assert "ACC-" in capsys.readouterr().out


@pytest.mark.usefixtures("registered")
def test_records_that_differ_are_flaky(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", replay.encode(trial(engine="moody")), "--times", "2"]) == 1
    output = capsys.readouterr().out
    assert output.startswith("FLAKY")
    assert len(digests(output)) == 2


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["preempt1:damaged"], "damaged"),
        (["no-such-file"], "neither a replay string nor a file"),
        ([replay.encode(trial(engine="nonesuch"))], "There is no engine 'nonesuch'"),
        ([replay.encode(trial(engine="broken"))], "no module named foreign_engine"),
        ([replay.encode(trial(plan="preempt:r9@out=3"))], "r9"),
        ([replay.encode(trial()), "--times", "0"], "Give 1 or more"),
        ([replay.encode(trial()), "--log", "/no/such/folder/log"], "Choose another file"),
    ],
)
def test_bad_arguments_end_with_one_line(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("preempt-harness replay: ")
    assert error.count("\n") == 1
    assert why in error


@pytest.mark.usefixtures("registered")
def test_adapters_are_listed_and_a_broken_one_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["adapters"]) == 1
    output = capsys.readouterr().out
    assert "forgetful (registered by another package)" in output
    assert "broken    ImportError: no module named foreign_engine" in output


def test_the_embedded_adapter_is_listed_with_what_it_can_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["adapters"]) == 0
    output = capsys.readouterr().out
    assert "status    installed" in output
    assert "hold_blocks" in output


def test_an_engine_that_lacks_something_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EmbeddedAdapter, "missing", lambda self: "pip install something")
    assert main(["adapters"]) == 0
    assert "missing: pip install something" in capsys.readouterr().out
    assert main(["replay", replay.encode(trial())]) == 2
    assert "pip install something" in capsys.readouterr().err
