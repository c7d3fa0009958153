"""A repository with an engine of its own uses the plugin: adapter, scenarios, fixtures, suite."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from preempt_harness import replay
from tests.plugin.conftest import ROOT, SOURCE_PATHS, RunPytest

HOOK = """
from tests.plugin.foreign_adapter import {imports}

def pytest_preempt_adapters(config):
    return [{adapters}]
"""

SCENARIO = """
import pytest

def test_own_scenario(preempt):
    result = preempt.run(
        preempt.workload(requests=4, prompt_tokens=(6, 20), max_tokens=16), block_size=4
    )
    result.assert_preempted(at_least=1, mode="recompute")
    result.assert_matches_baseline()
    result.assert_clean(require=["kvsan", "accounting", "delivery"])

@pytest.mark.preempt(block_size=2, enable_prefix_caching=False)
def test_own_plan(preempt, preempt_plan, preempt_adapter):
    assert preempt_adapter.name == "foreign"
    result = preempt.run(
        preempt.workload(requests=2, prompt_tokens=9, max_tokens=8),
        plan=preempt_plan("preempt:r0@out=1", "preempt:r0@resume=1"),
    )
    result.assert_preempted(request="r0", phase="just_resumed")
    result.assert_matches_baseline()
    result.assert_clean()

@pytest.mark.preempt_requires("swap")
def test_swapped(preempt):
    raise AssertionError("never run")

def test_embedded_engine_beside_it(tiny_llm):
    from preempt_engine import SamplingParams

    prompts = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14, 15, 16]]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    tight = tiny_llm(num_kv_blocks=6)
    outputs = [output.outputs[0].token_ids for output in tight.generate(prompts, params)]
    roomy = tiny_llm(num_kv_blocks=40)
    assert outputs == [output.outputs[0].token_ids for output in roomy.generate(prompts, params)]
    assert tight.counters.num_preemptions > roomy.counters.num_preemptions == 0
"""

FAULTS = """
import pytest

CASES = {
    # fault: (code, request, step, block is known)
    "swapped_blocks": ("KVSAN-STALE-READ", "r1", 4, True),
    "dropped_tail_token": ("KVSAN-GAP", "r1", 5, True),
    "prefix_without_parent": ("KVSAN-STALE-READ", "r1", 4, True),
    "repeated_delta": ("DEL-TOKEN-REPEATED", "r1", 4, False),
    "counter": ("ACC-COUNTER", None, 3, False),
}
ROUNDS = [name for fault in CASES for name in (fault, "")]

@pytest.mark.parametrize("fault", ROUNDS)
def test_it(preempt, fault):
    # Both prompts continue differing first blocks with the same two blocks.
    workload = preempt.workload(requests=2, prompt_tokens=4, max_tokens=10)
    later = preempt.prompts.take(8)
    for request in workload.requests:
        request.prompt_token_ids.extend([*later, request.prompt_token_ids[0]])
    result = preempt.run(
        workload, plan="preempt:r1@out=3", block_size=4, options={"bug": fault} if fault else {}
    )
    result.assert_preempted(request="r1")
    if not fault:
        result.assert_matches_baseline()
        result.assert_clean()
        return
    code, request, step, has_block = CASES[fault]
    [finding] = [finding for finding in result.findings if finding.code == code]
    assert (finding.request, finding.step) == (request, step)
    assert (finding.block is not None) == has_block
    assert result.findings[0].code.partition("-")[0] in ("KVSAN", "ACC")
    with pytest.raises(AssertionError, match=code):
        result.assert_clean()
"""


def write_hook(folder: Path, *adapters: str) -> None:
    calls = ", ".join(f"{adapter}()" for adapter in adapters)
    (folder / "conftest.py").write_text(HOOK.format(imports=", ".join(adapters), adapters=calls))


def register(folder: Path, **adapters: str) -> str:
    """A package that registers adapters by entry point; returns a PYTHONPATH that has it."""
    info = folder / "site" / "somebodys_engine-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys-engine\nVersion: 1.0\n")
    lines = [f"{name} = tests.plugin.foreign_adapter:{kind}" for name, kind in adapters.items()]
    (info / "entry_points.txt").write_text("\n".join(["[preempt_harness.adapters]", *lines, ""]))
    return os.pathsep.join([*SOURCE_PATHS, str(info.parent)])


WITH_XDIST = pytest.mark.parametrize(
    "arguments", [(), ("-p", "xdist.plugin", "-n", "2")], ids=["alone", "xdist"]
)


@WITH_XDIST
def test_an_adapter_by_hook_is_the_default_engine(
    run_pytest: RunPytest, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    write_hook(tmp_path, "ForeignAdapter")
    (tmp_path / "test_own.py").write_text(SCENARIO)
    completed = run_pytest("-p", "preempt_harness", *arguments)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "3 passed, 1 skipped" in completed.stdout
    assert "2 trials on foreign/toy: 2 EQUAL" in completed.stdout
    assert "skipped 1: engine foreign lacks swap" in completed.stdout


@WITH_XDIST
def test_an_adapter_by_entry_point_is_the_default_engine(
    run_pytest: RunPytest, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    path = register(tmp_path, foreign="ForeignAdapter")
    (tmp_path / "test_own.py").write_text(SCENARIO)
    completed = run_pytest("-p", "preempt_harness", *arguments, PYTHONPATH=path)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "3 passed, 1 skipped" in completed.stdout
    assert "2 trials on foreign/toy: 2 EQUAL" in completed.stdout


@pytest.mark.parametrize("by", ["hook", "entry-point-and-xdist"])
def test_the_suite_that_ships_runs_on_it(run_pytest: RunPytest, tmp_path: Path, by: str) -> None:
    """A part of it, to be quick; what the engine cannot do is skipped and counted."""
    path, arguments = os.pathsep.join(SOURCE_PATHS), ["-p", "preempt_harness"]
    if by == "hook":
        write_hook(tmp_path, "ForeignAdapter")
    else:
        path = register(tmp_path, foreign="ForeignAdapter")
        arguments += ["-p", "xdist.plugin", "-n", "2"]
    completed = run_pytest(
        *(*arguments, "--pyargs", "preempt_harness.suite"),
        *("-k", "test_neighbours or test_infeasible"),
        PYTHONPATH=path,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "trials on foreign/toy: " in completed.stdout
    assert "skipped 12: engine foreign lacks abort" in completed.stdout
    assert "failed" not in completed.stdout


def test_another_engine_can_be_asked_for(run_pytest: RunPytest, tmp_path: Path) -> None:
    write_hook(tmp_path, "ForeignAdapter")
    (tmp_path / "test_own.py").write_text(SCENARIO)
    completed = run_pytest(
        "-p", "preempt_harness", "--preempt-engine", "embedded", "-k", "test_own_scenario"
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "engine embedded, model exact" in completed.stdout
    assert "1 trials on embedded/exact: 1 EQUAL" in completed.stdout


def test_planted_faults_are_found_where_they_are(run_pytest: RunPytest, tmp_path: Path) -> None:
    """Each by its check, with step, request and block; the trial after it is clean."""
    write_hook(tmp_path, "ForeignAdapter")
    (tmp_path / "test_faults.py").write_text(FAULTS)
    completed = run_pytest("-p", "preempt_harness")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "10 passed" in completed.stdout


def test_an_engine_that_makes_no_progress_hangs(run_pytest: RunPytest, tmp_path: Path) -> None:
    """It answers every poll, so that no watchdog sees it; the number of polls does."""
    write_hook(tmp_path, "ForeignAdapter")
    (tmp_path / "test_idle.py").write_text(
        "def test_idle(preempt):\n"
        "    result = preempt.run(preempt.workload(requests=2, max_tokens=8),\n"
        "                         plan='preempt:r1@out=3', options={'bug': 'idle'})\n"
        "    assert str(result.verdict) == 'HANG'\n"
        "    codes = {str(finding.code) for finding in result.findings}\n"
        "    assert codes == {'CRASH-HANG', 'PROG-LIVELOCK', 'PROG-STEP-BOUND'}\n"
        "    result.asserted = True\n"
    )
    completed = run_pytest("-p", "preempt_harness")
    assert completed.returncode == 0, completed.stdout + completed.stderr


def test_a_black_box_passes_what_it_shows_and_fails_what_is_required(
    run_pytest: RunPytest, tmp_path: Path
) -> None:
    write_hook(tmp_path, "BlackBoxAdapter")
    (tmp_path / "test_own.py").write_text(
        "def test_what_is_shown(preempt):\n"
        "    result = preempt.run(preempt.workload(max_tokens=8), expect_preemption=False)\n"
        "    result.assert_matches_baseline()\n"
        "    result.assert_clean(require=['delivery', 'tokens', 'crash'])\n"
        "def test_what_is_required(preempt):\n"
        "    result = preempt.run(preempt.workload(max_tokens=8), expect_preemption=False)\n"
        "    result.assert_clean(require=['kvsan'])\n"
        "def test_no_preemption_is_shown(preempt):\n"
        "    preempt.run(preempt.workload(max_tokens=8)).assert_clean()\n"
    )
    completed = run_pytest("-p", "preempt_harness")
    assert completed.returncode == 1
    assert "2 failed, 1 passed" in completed.stdout
    assert "NOT OBSERVABLE: kvsan/contents: blackbox does not show" in completed.stdout
    assert "VACUOUS: nothing was preempted" in completed.stdout
    assert "NOT OBSERVABLE in 3 trials: kvsan/contents" in completed.stdout


def test_two_engines_of_ones_own_must_be_chosen_between(
    run_pytest: RunPytest, tmp_path: Path
) -> None:
    write_hook(tmp_path, "ForeignAdapter", "BlackBoxAdapter")
    (tmp_path / "test_own.py").write_text(SCENARIO)
    completed = run_pytest("-p", "preempt_harness", "-k", "own_scenario")
    assert completed.returncode != 0
    assert "Several engines are registered: blackbox, foreign." in completed.stdout
    assert "Choose one with --preempt-engine NAME" in completed.stdout
    completed = run_pytest(
        "-p", "preempt_harness", "-k", "own_scenario", "--preempt-engine", "foreign"
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr


def test_the_ambiguity_is_a_usage_error_where_an_option_asks_for_the_plugin(
    run_pytest: RunPytest, tmp_path: Path
) -> None:
    """Before anything is collected, and without a traceback."""
    path = register(tmp_path, foreign="ForeignAdapter", blackbox="BlackBoxAdapter")
    (tmp_path / "test_own.py").write_text(SCENARIO)
    completed = run_pytest("-p", "preempt_harness", "--preempt-seed", "1", PYTHONPATH=path)
    assert completed.returncode == 4
    assert "Several engines are registered: blackbox, foreign." in completed.stderr
    assert "Traceback" not in completed.stderr


def test_the_printed_replay_repeats_the_trial_in_every_worker(
    run_pytest: RunPytest, tmp_path: Path
) -> None:
    """What a failure prints is pasted after pytest, and gives the same record in each worker."""
    write_hook(tmp_path, "ForeignAdapter")
    with (tmp_path / "conftest.py").open("a") as file:
        file.write(
            "\ndef pytest_preempt_trial_finished(config, result):\n"
            "    worker = getattr(config, 'workerinput', {}).get('workerid', 'alone')\n"
            "    with open(f'digests-{worker}', 'a') as file:\n"
            "        file.write(result.record.digest() + '\\n')\n"
        )
    (tmp_path / "test_own.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('number', range(6))\n"
        "def test_it(preempt, number):\n"
        "    result = preempt.run(preempt.workload(requests=3, max_tokens=8 + number),\n"
        "                         options={'bug': 'swapped_blocks'})\n"
        "    result.assert_clean()\n"
    )
    completed = run_pytest("-p", "preempt_harness", "-k", "4")
    assert completed.returncode == 1
    [command] = {
        line.partition("replay: ")[2]
        for line in completed.stdout.splitlines()
        if "replay: pytest" in line
    }
    program, *arguments = shlex.split(command)
    assert program == "pytest"
    assert replay.decode(arguments[-1]).settings.options == {"bug": "swapped_blocks"}
    arguments.remove("test_own.py::test_it[4]")  # in all six tests, to occupy both workers
    completed = run_pytest("-p", "xdist.plugin", "-n", "2", *arguments)
    assert "6 failed" in completed.stdout
    [first] = (tmp_path / "digests-alone").read_text().split()
    workers = [(tmp_path / f"digests-gw{number}").read_text().split() for number in range(2)]
    assert sum(map(len, workers)) == 6
    assert {digest for worker in workers for digest in worker} == {first}


MY_ENGINE = """
from tests.plugin.foreign_engine import VOCAB_SIZE, ForeignEngine

class Engine:
    def __init__(self, num_blocks, block_size):
        self.engine = ForeignEngine(
            num_blocks=num_blocks, block_size=block_size, token_budget=2048, max_running=256,
            prefix_caching=True, listener=lambda name, fields: None,
        )

    def add(self, prompt, max_tokens):
        name = str(len(self.engine.sequences))
        self.engine.add(name, prompt, max_tokens)
        return self.engine.sequences[name]

    def step(self):
        self.engine.step()
"""


def test_the_guides_smallest_adapter_works_as_it_is_printed(
    run_pytest: RunPytest, tmp_path: Path
) -> None:
    guide = (ROOT / "docs" / "write-an-adapter.md").read_text()
    blocks = [block.partition("```")[0] for block in guide.split("```python\n")[1:]]
    (tmp_path / "my_engine.py").write_text(MY_ENGINE)
    for name, block in zip(("my_adapter", "conftest", "test_mine"), blocks, strict=False):
        (tmp_path / f"{name}.py").write_text(block)
    for isolation in ("none", "process"):
        completed = run_pytest("-p", "preempt_harness", "--preempt-isolation", isolation)
        assert completed.returncode == 0, completed.stdout + completed.stderr
        assert "1 trials on mine/toy: 1 EQUAL" in completed.stdout
    with (tmp_path / "test_mine.py").open("a") as file:
        file.write('    result.assert_clean(require=["kvsan"])\n')
    completed = run_pytest("-p", "preempt_harness")
    assert "NOT OBSERVABLE: kvsan/contents: mine does not show Arrived, Computed" in (
        completed.stdout
    )
