"""Options, ini keys and markers: their precedence, and clear errors for wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plugin.conftest import RunPytest

SHOW = """
import pytest

def test_shows(preempt_settings, preempt_adapter):
    print("GOT", preempt_adapter.name, preempt_settings.seed, preempt_settings.model)

@pytest.mark.preempt(seed=7)
def test_marked(preempt_settings):
    print("MARKED", preempt_settings.seed)
"""


@pytest.mark.parametrize(
    ("ini", "line", "expected"),
    [
        ("", (), "GOT embedded 0 exact"),
        ("preempt_seed = 3", (), "GOT embedded 3 exact"),
        ("preempt_seed = 3", ("--preempt-seed", "4"), "GOT embedded 4 exact"),
    ],
    ids=["default", "ini", "command-line"],
)
def test_precedence(
    run_pytest: RunPytest, tmp_path: Path, ini: str, line: tuple[str, ...], expected: str
) -> None:
    (tmp_path / "pytest.ini").write_text(f"[pytest]\n{ini}\n")
    (tmp_path / "test_it.py").write_text(SHOW)
    completed = run_pytest("-p", "preempt_harness", "-s", *line)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert expected in completed.stdout
    assert "MARKED 7" in completed.stdout


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (("--preempt-engine", "nonesuch"), "There is no engine 'nonesuch'"),
        (("--preempt-tp", "0"), "tensor parallel size is 1 or more"),
        (("--preempt-isolation", "vm"), "choose none or process"),
        (("--preempt-poll-timeout-s", "0"), "give seconds above 0"),
        (("--preempt-replay", "preempt1:@@"), "The replay string is damaged"),
        (("--preempt-replay", "hello"), "does not begin with"),
    ],
)
def test_a_wrong_option_is_a_usage_error(
    run_pytest: RunPytest, tmp_path: Path, line: tuple[str, ...], text: str
) -> None:
    (tmp_path / "test_it.py").write_text(SHOW)
    completed = run_pytest("-p", "preempt_harness", *line)
    assert completed.returncode == 4, completed.stdout + completed.stderr
    assert text in completed.stderr
    assert "Traceback" not in completed.stderr


def test_a_wrong_ini_value_is_a_usage_error(run_pytest: RunPytest, tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\npreempt_seed = many\n")
    (tmp_path / "test_it.py").write_text(SHOW)
    completed = run_pytest("-p", "preempt_harness")
    assert completed.returncode == 4
    assert "preempt_seed = 'many': expected int" in completed.stderr


def test_a_model_that_does_not_exist_fails_with_the_remedy(
    run_pytest: RunPytest, tmp_path: Path
) -> None:
    (tmp_path / "test_it.py").write_text(
        "def test_it(preempt):\n    preempt.run(preempt.workload(max_tokens=4))\n"
    )
    completed = run_pytest("-p", "preempt_harness", "--preempt-model", "/no/such/model")
    assert completed.returncode == 1
    assert "ModelNotFoundError" in completed.stdout
    assert "/no/such/model" in completed.stdout


@pytest.mark.parametrize(
    ("mark", "text"),
    [
        ("preempt_requires('teleport')", "no such capability"),
        ("preempt_matrix(block_size=4)", "give a list of values"),
        ("preempt_matrix(block=[4])", "expected keyword arguments"),
        ("preempt(blocks=4)", "expected keyword arguments"),
    ],
)
def test_a_wrong_marker_says_what_is_known(
    run_pytest: RunPytest, tmp_path: Path, mark: str, text: str
) -> None:
    (tmp_path / "test_it.py").write_text(
        f"import pytest\n@pytest.mark.{mark}\ndef test_it(preempt):\n    pass\n"
    )
    completed = run_pytest("-p", "preempt_harness")
    assert completed.returncode != 0
    assert text in completed.stdout + completed.stderr


def test_the_matrix_runs_every_combination(run_pytest: RunPytest, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "@pytest.mark.preempt_matrix(block_size=[2, 4], enable_prefix_caching=[True, False])\n"
        "def test_it(preempt_settings):\n"
        "    print('CELL', preempt_settings.block_size, preempt_settings.enable_prefix_caching)\n"
    )
    completed = run_pytest("-p", "preempt_harness", "-s", "-v")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert completed.stdout.count("CELL") == 4
    assert "test_it[block_size=2-enable_prefix_caching=True]" in completed.stdout


def test_a_replayed_trial_runs_instead(run_pytest: RunPytest, tmp_path: Path) -> None:
    import msgspec

    from preempt_harness import replay
    from preempt_harness.adapters.protocol import EngineSettings
    from preempt_harness.trial import Trial
    from preempt_harness.workload import RequestSpec, SamplingSpec, Workload

    trial = Trial(
        engine="embedded",
        settings=EngineSettings(num_blocks=6, block_size=4),
        workload=Workload(
            requests=[
                RequestSpec(
                    id=f"q{index}",
                    prompt_token_ids=[5 + index] * 6,
                    sampling=SamplingSpec(max_tokens=9),
                )
                for index in range(3)
            ]
        ),
    )
    assert replay.decode(replay.encode(trial)) == trial
    assert msgspec.json.encode(trial)
    (tmp_path / "test_it.py").write_text(
        "def test_it(preempt):\n"
        "    result = preempt.run(preempt.workload(requests=2, max_tokens=4), 100)\n"
        "    print('RAN', sorted(result.record.results))\n"
        "    result.assert_preempted()\n"
    )
    completed = run_pytest("-p", "preempt_harness", "-s", "--preempt-replay", replay.encode(trial))
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "RAN ['q0', 'q1', 'q2']" in completed.stdout


def test_the_report_file_has_a_line_per_trial(run_pytest: RunPytest, tmp_path: Path) -> None:
    from preempt_harness.summary import TrialSummary

    (tmp_path / "test_it.py").write_text(
        "def test_it(preempt):\n"
        "    result = preempt.run(preempt.workload(requests=3, max_tokens=16), block_size=4)\n"
        "    result.assert_preempted()\n"
    )
    completed = run_pytest(
        "-p", "preempt_harness", "--preempt-report", "report.jsonl", "--junitxml", "junit.xml"
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    [line] = (tmp_path / "report.jsonl").read_text().splitlines()
    summary = TrialSummary.from_json(line)
    assert summary.verdict == "EQUAL"
    assert summary.preemptions
    junit = (tmp_path / "junit.xml").read_text()
    assert 'name="preempt_verdict" value="EQUAL"' in junit
