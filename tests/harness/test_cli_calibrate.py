"""`preempt-harness calibrate`: its statistics, its refusals, and one small measurement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from preempt_harness import tolerances
from preempt_harness.adapters import protocol
from preempt_harness.adapters.embedded import EmbeddedAdapter, EmbeddedSession
from preempt_harness.adapters.protocol import EngineSettings
from preempt_harness.cli._calibration import (
    CalibrationError,
    Margins,
    Measurement,
    at_quantile,
    calibration_of,
    decode_margin,
    score_margin,
)
from preempt_harness.cli.main import main
from preempt_harness.record import AnyEvent, Preempted, Score

SETTINGS = EngineSettings(model="tiny-llama", num_blocks=1, dtype="bfloat16")


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """Tiny models gain nothing from threads, and idle threads that spin slow a shared machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tolerance_of(margins: Sequence[Margins], quantile: float) -> tolerances.Calibration:
    return calibration_of(Measurement(list(margins), {}, {}), quantile, SETTINGS, "embedded", "cpu")


def score(token_id: int, logprob: float, *, top: int, top_logprob: float, second: float) -> Score:
    return Score(
        token_id=token_id,
        logprob=logprob,
        top_token_id=top,
        top_logprob=top_logprob,
        second_logprob=second,
    )


# Statistics ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quantile", "value"), [(0.01, 1), (0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (1.0, 4)]
)
def test_a_quantile_is_the_least_value_that_the_share_does_not_exceed(
    quantile: float, value: float
) -> None:
    assert at_quantile([1, 2, 3, 4], quantile) == value


def test_a_margin_is_the_chosen_tokens_lead_over_the_best_other() -> None:
    assert decode_margin(7, {3: -2.0, 7: -0.5}) == 1.5
    assert score_margin(score(7, -0.5, top=7, top_logprob=-0.5, second=-1.25)) == 0.75


def test_a_margin_is_negative_where_the_reference_prefers_another_token() -> None:
    assert score_margin(score(7, -1.0, top=3, top_logprob=-0.75, second=-1.0)) == -0.25
    assert Margins(0.125, -0.25).flipped
    assert Margins(0.125, -0.25).noise == 0.375


@pytest.mark.parametrize("logprobs", [{}, {7: -0.5}, {3: -0.5, 4: -1.0}])
def test_log_probabilities_without_the_two_best_are_refused(logprobs: dict[int, float]) -> None:
    with pytest.raises(CalibrationError, match="logprobs=2"):
        decode_margin(7, logprobs)


def test_a_tolerance_is_twice_the_quantile_of_the_noise() -> None:
    margins = [Margins(1.0, 1.0 + index / 64) for index in range(65)]
    assert tolerance_of(margins, 1.0).gap == 2.0
    assert tolerance_of(margins, 1.0).regret == 2.0
    assert tolerance_of(margins, 0.5).gap == 2 * 32 / 64
    assert tolerance_of(margins, 0.5).noise["1"] == 1.0
    assert tolerance_of(margins, 0.5).num_positions == 65


def test_no_flip_of_the_calibration_itself_is_beyond_its_tolerance() -> None:
    """A low quantile must not make the calibration's own runs diverge."""
    calm = [Margins(1.0, 1.0)] * 99
    result = tolerance_of([*calm, Margins(0.5, -0.25)], 0.5)
    assert (result.gap, result.regret, result.num_flips) == (0.5, 0.25, 1)


# Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--model", "exact"], "claims batch invariance"),
        (["--engine", "nonesuch"], "There is no engine"),
        (["--positions", "0"], "Give 1 or more"),
        (["--quantile", "1.5"], "Give a share"),
        (["--quantile", "0"], "Give a share"),
        (["--output", __file__], "is no tolerance table"),
    ],
)
def test_bad_arguments_end_with_one_line(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("preempt-harness calibrate: ")
    assert error.count("\n") == 1
    assert why in error


def test_an_engine_without_scores_cannot_be_calibrated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        EmbeddedAdapter, "capabilities", EmbeddedAdapter.capabilities - {protocol.SCORE}
    )
    assert main(["calibrate"]) == 2
    assert "it lacks score" in capsys.readouterr().err


# Measurement --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_torch_thread")
def test_a_measurement_is_written_beside_what_the_file_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "tolerances.json"
    tolerances.write(
        tolerances.ToleranceTable(
            calibrations=[tolerance_of([Margins(1.0, 1.5)], 1.0)],
        ),
        table,
    )
    assert main(["calibrate", "--positions", "1", "--output", str(table)]) == 0
    bfloat16, float32 = tolerances.read(table).calibrations
    assert (bfloat16.dtype, bfloat16.gap) == ("bfloat16", 1.0)
    assert (float32.dtype, float32.device, float32.num_positions) == ("float32", "cpu", 192)
    # float32 has 24 bits of mantissa; logits of some units, some layers: far below 1e-3.
    assert 0 < float32.gap < 1e-3
    assert float32.versions["torch"]
    assert f"written to {table}" in capsys.readouterr().out


@pytest.mark.usefixtures("one_torch_thread")
def test_a_calibration_that_was_preempted_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    poll = EmbeddedSession.poll

    def preempted(self: EmbeddedSession, timeout_s: float) -> Sequence[AnyEvent]:
        lie: Any = Preempted(0, "r0", "recompute", "decode", "out_of_blocks", 1, 1)
        return [*poll(self, timeout_s), lie]

    monkeypatch.setattr(EmbeddedSession, "poll", preempted)
    assert main(["calibrate", "--positions", "1"]) == 2
    assert "was preempted although it had room" in capsys.readouterr().err


@pytest.mark.usefixtures("one_torch_thread")
def test_a_session_says_what_its_dtype_and_device_became() -> None:
    settings = EngineSettings(
        model="tiny-llama", num_blocks=8, deterministic=False, options={"device": "cpu"}
    )
    session = EmbeddedAdapter().open(settings)
    session.close()
    assert session.info.config["dtype"] == "float32"
    assert session.info.config["device"] == "cpu"
