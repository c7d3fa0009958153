"""The openai-http adapter against a small server of the tests' own, whole and broken."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from preempt_harness.adapters.openai_answers import PRESETS, count_of
from preempt_harness.adapters.openai_http import OpenAIHttpAdapter
from preempt_harness.adapters.openai_server import ServerProcess, ServerStartError
from preempt_harness.checks import run_checks
from preempt_harness.errors import UnsupportedTrialError
from preempt_harness.harness import PreemptHarness
from preempt_harness.result import TrialResult
from preempt_harness.trial import Trial, run_trial
from preempt_harness.verdict import Verdict
from preempt_harness.workload import Operation, RequestSpec, SamplingSpec, Workload
from tests.harness.fake_server import VOCAB_SIZE, next_token

FAKE = str(Path(__file__).with_name("fake_server.py"))
OUTPUTS = 8


def command(mode: str) -> list[str]:
    return [sys.executable, FAKE, "{port}", mode]


def serve(mode: str) -> ServerProcess:
    return ServerProcess(command(mode), health_path="/health", start_timeout_s=60)


@pytest.fixture
def adapter_of(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Makes adapters, and ends their servers."""
    made: list[OpenAIHttpAdapter] = []

    def make(mode: str, **arguments: Any) -> OpenAIHttpAdapter:
        made.append(
            OpenAIHttpAdapter(
                command=command(mode),
                model="toy",
                vocab_size=VOCAB_SIZE,
                **{"preset": "vllm", **arguments},
            )
        )
        return made[-1]

    yield make
    for adapter in made:
        adapter.close_kept()


def requests(*lengths: int, **sampling: Any) -> list[RequestSpec]:
    return [
        RequestSpec(
            id=f"r{index}",
            prompt_token_ids=[(index + place) % VOCAB_SIZE for place in range(length)],
            sampling=SamplingSpec(max_tokens=OUTPUTS, **sampling),
        )
        for index, length in enumerate(lengths)
    ]


def run(
    adapter: OpenAIHttpAdapter, workload: Workload | None = None, **arguments: Any
) -> TrialResult:
    """A trial whose baseline comes from a good server."""
    harness = PreemptHarness(adapter, poll_timeout_s=arguments.pop("poll_timeout_s", 60.0))
    good = OpenAIHttpAdapter(
        command=command("good"), model="toy", vocab_size=VOCAB_SIZE, preset="llama.cpp"
    )
    workload = workload or Workload(requests=requests(5, 9, 17))
    try:
        settings = harness.settings(num_blocks=64)
        harness.baselines = PreemptHarness(good).baselines
        harness.baselines.get(settings, workload, good)
        return harness.run(
            workload, 64, **{"expect_preemption": False, "baseline": "same-config", **arguments}
        )
    finally:
        good.close_kept()


def codes(result: TrialResult) -> set[str]:
    return {str(finding.code) for finding in result.findings}


# A server that works ------------------------------------------------------------------------------


def test_a_good_server_is_clean_and_gives_what_its_model_says(adapter_of: Any) -> None:
    workload = Workload(requests=requests(5, 9, 17, logprobs=2))
    result = run(adapter_of("good"), workload)
    result.assert_matches_baseline()
    result.assert_clean(require=["tokens", "delivery"])
    for request in workload.requests:
        token_ids = list(request.prompt_token_ids)
        for _ in range(OUTPUTS):
            token_ids.append(next_token(token_ids))
        output = result.record.results[request.id].outputs[0]
        assert output.token_ids == token_ids[request.num_prompt_tokens :]
        assert output.logprobs is not None
        assert output.logprobs[0][output.token_ids[0]] == -0.25


def test_preemptions_are_what_the_counter_rose_by(adapter_of: Any) -> None:
    adapter = adapter_of("preempts")
    run(adapter).assert_preempted(at_least=6, mode="recompute")
    again = run(adapter)  # of the same server, whose counter goes on
    assert len(again.summary().preemptions) == 6


def test_a_server_that_never_preempts_skips_what_is_about_preemption(adapter_of: Any) -> None:
    harness = PreemptHarness(adapter_of("good", preset="llama.cpp"))
    with pytest.raises(UnsupportedTrialError, match="never preempts"):
        harness.run(Workload(requests=requests(5)))


def test_a_refused_request_ends_with_the_servers_words(adapter_of: Any) -> None:
    result = run(adapter_of("good"), Workload(requests=requests(5, 101)))
    assert "the prompt is too long" in result.record.results["r1"].error
    assert len(result.record.results["r0"].outputs[0].token_ids) == OUTPUTS


def test_whole_characters_are_asked_for_where_parts_of_them_are_not_named(adapter_of: Any) -> None:
    """llama.cpp counts tokens that are part of a character, and never shows them."""
    workload = Workload(requests=requests(5, 9, 17, logprobs=2))
    adapter = adapter_of("characters", preset="llama.cpp")
    harness = PreemptHarness(adapter)
    result = harness.run(workload, 64, expect_preemption=False)
    result.assert_matches_baseline()
    result.assert_clean(require=["tokens", "delivery"])
    for request in workload.requests:
        output = result.record.results[request.id].outputs[0]
        token_ids = list(request.prompt_token_ids)
        assert len(output.token_ids) == OUTPUTS
        for token_id, shown in zip(output.token_ids, output.logprobs or [], strict=True):
            assert token_id == next_token(token_ids) - next_token(token_ids) % 2
            token_ids.append(token_id)
            assert shown == {token_id: -0.25, (token_id + 2) % VOCAB_SIZE: -2.0}


def test_tokens_that_are_counted_and_not_named_are_found(
    adapter_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the same server, whose tokens are not restricted."""
    preset = dataclasses.replace(PRESETS["llama.cpp"], body={})
    monkeypatch.setitem(PRESETS, "llama.cpp", preset)
    adapter = adapter_of("characters", preset="llama.cpp")
    settings = PreemptHarness(adapter).settings(num_blocks=64)
    trial = Trial(
        engine=adapter.name, settings=settings, workload=Workload(requests=requests(5, 9, 17))
    )
    found = [str(finding) for finding in run_checks(run_trial(trial, adapter)).findings]
    assert len(found) == 3
    assert all("PROG-UNDUE-ERROR" in finding for finding in found)
    assert all("counts 8 completion tokens" in finding for finding in found)


def test_an_aborted_request_leaves_the_others(adapter_of: Any) -> None:
    workload = Workload(
        requests=requests(5, 9, 17), operations=[Operation(kind="abort", step=0, request="r1")]
    )
    result = run(adapter_of("good"), workload)
    result.assert_matches_baseline()
    result.assert_clean()
    assert result.record.results["r1"].outputs[0].finish_reason == "abort"


def test_a_late_arrival_is_not_waited_for_while_nothing_runs(adapter_of: Any) -> None:
    """Polls of an idle server would only pass by their time limit."""
    first, late = requests(5, 9)
    workload = Workload(requests=[first, msgspec.structs.replace(late, arrival_step=1000)])
    result = run(adapter_of("good"), workload)
    result.assert_matches_baseline()
    result.assert_clean()


def test_scores_are_of_the_continuation(adapter_of: Any) -> None:
    adapter = adapter_of("good")
    session = adapter.open(PreemptHarness(adapter).settings())
    first = next_token([1, 2])
    right, wrong = session.score([1, 2], [first, (next_token([1, 2, first]) + 1) % VOCAB_SIZE])
    session.close()
    assert (right.top_token_id, right.logprob, right.second_logprob) == (first, -0.25, -2.0)
    assert (wrong.top_token_id, wrong.logprob) == (next_token([1, 2, first]), -2.0)


# A server that does not ---------------------------------------------------------------------------


def test_a_server_that_ends_early_is_named_with_its_last_words() -> None:
    with pytest.raises(ServerStartError, match=r"ended with status 3 (?s:.*)no such model"):
        serve("exits")


def test_a_command_that_does_not_exist_is_named() -> None:
    with pytest.raises(ServerStartError, match="cannot be started"):
        ServerProcess(["no-such-program"], health_path="/health", start_timeout_s=60)


def test_a_server_that_is_never_ready_is_given_up_and_ended() -> None:
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(ServerStartError, match=r"did not answer /health with 200 within 1 s"):
        ServerProcess(command("never"), health_path="/health", start_timeout_s=1.0)
    assert set(psutil.Process().children(recursive=True)) <= before


@pytest.mark.parametrize(
    ("mode", "code", "how"),
    [
        ("killed", "CRASH-SIGNAL", "was killed by SIGKILL"),
        ("exits-later", "CRASH-EXIT", "exited with status 5"),
    ],
)
def test_a_server_that_ends_in_mid_run_is_a_crash_and_leaves_no_orphan(
    adapter_of: Any, mode: str, code: str, how: str
) -> None:
    adapter = adapter_of(mode)
    result = run(adapter)
    assert codes(result) == {code}
    assert result.verdict is Verdict.ERROR
    assert how in str(result.findings[0])
    adapter.close_kept()
    assert not [item for item in psutil.Process().children(recursive=True) if _is_fake(item)]


def test_a_stream_that_breaks_off_is_an_error_of_its_request(adapter_of: Any) -> None:
    result = run(adapter_of("drop"))
    assert "PROG-UNDUE-ERROR" in codes(result)
    assert "without [DONE]" in result.record.results["r0"].error


def test_a_token_that_the_stream_loses_is_seen(adapter_of: Any) -> None:
    result = run(adapter_of("loses"))
    assert result.verdict is Verdict.DIVERGED
    error = result.record.results["r0"].error
    assert error == f"the server counts {OUTPUTS} completion tokens, {OUTPUTS - 1} came"


def test_a_server_that_falls_silent_is_hung(adapter_of: Any) -> None:
    result = run(adapter_of("silent"), poll_timeout_s=1.0)
    assert codes(result) == {"CRASH-HANG"}


# Death --------------------------------------------------------------------------------------------


def test_a_server_that_ignores_signals_and_detaches_a_child_is_ended_with_it() -> None:
    server = serve("detaches")
    match = re.search(r"detached (\d+)", server.log_tail())
    assert match is not None
    detached = psutil.Process(int(match[1]))
    server.close()
    _, alive = psutil.wait_procs([detached], timeout=10)
    assert not alive


def test_a_server_outlives_no_parent() -> None:
    """Not even one that is killed."""
    code = (
        "import sys; from tests.harness.test_openai_http import serve; s = serve('good');"
        "print(s.pid, flush=True); sys.stdin.read()"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        cwd=Path(__file__).parents[2],
    )
    assert parent.stdout is not None
    assert parent.stdin is not None
    guard = psutil.Process(int(parent.stdout.readline()))
    family = [guard, *guard.children(recursive=True)]
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    _, alive = psutil.wait_procs(family, timeout=20)
    parent.stdin.close()
    parent.stdout.close()
    assert not alive


# Small parts --------------------------------------------------------------------------------------


def test_without_a_server_one_line_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PREEMPT_HTTP_")]:
        monkeypatch.delenv(name)
    missing = OpenAIHttpAdapter().missing()
    assert missing is not None
    assert "PREEMPT_HTTP_COMMAND" in missing
    assert "\n" not in missing


def test_an_unknown_preset_is_named_with_those_there_are() -> None:
    with pytest.raises(ServerStartError, match=r"no server preset 'vlm'.*vllm, sglang, llama.cpp"):
        OpenAIHttpAdapter(preset="vlm")


def test_the_environment_names_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREEMPT_HTTP_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("PREEMPT_HTTP_PRESET", "llama.cpp")
    adapter = OpenAIHttpAdapter()
    assert adapter.missing() is None
    assert "recompute" not in adapter.capabilities


def test_a_counter_is_summed_over_its_labels() -> None:
    text = (
        '# TYPE a_total counter\na_total{x="1"} 2.0\na_total{x="2"} 3\nb_a_total 9\na_total_x 9\n'
    )
    assert count_of(["a_total"], text) == 5
    assert count_of(["gone_total"], text) == 0


def _is_fake(process: psutil.Process) -> bool:
    try:
        return FAKE in process.cmdline()
    except psutil.Error:
        return False
