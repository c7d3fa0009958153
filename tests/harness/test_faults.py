"""Faults are data that fits the engine: each can be planted, is counted when it runs, and goes."""

from __future__ import annotations

import re
from types import FunctionType

import pytest

from preempt_engine import LLM
from preempt_engine.admission import WaitingQueue
from preempt_engine.sampling.params import SamplingParams
from preempt_harness.adapters.embedded import EmbeddedAdapter
from preempt_harness.adapters.protocol import CAPABILITIES
from preempt_harness.checks import Code
from preempt_harness.faults import (
    Fault,
    FaultTargetError,
    Patch,
    UnknownFaultError,
    all_faults,
    fault_named,
    plant,
    select_faults,
)
from preempt_harness.faults.catalogue import KINDS, kind_of
from preempt_harness.faults.patching import target_of
from preempt_harness.faults.planting import planted_everywhere
from preempt_harness.harness import PreemptHarness
from preempt_harness.verdict import Verdict

FAULTS = all_faults()
QUEUE = "preempt_engine.admission:WaitingQueue"


def made(*patches: Patch) -> Fault:
    """A fault of these patches."""
    return Fault(
        name="made", mechanism="none", source="mechanism", expected=("TOK",), patches=patches
    )


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_fits_the_engine_and_leaves_no_trace(fault: Fault) -> None:
    originals = [function.__code__ for function in _targets(fault)]
    with plant(fault) as planted:
        changed = [function.__code__ for function in _targets(fault)]
    assert all(code is not original for code, original in zip(changed, originals, strict=True))
    assert [function.__code__ for function in _targets(fault)] == originals
    assert planted.num_reached == 0


def test_faults_are_described() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names) >= 60
    codes = [str(code) for code in Code]
    for fault in FAULTS:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", fault.name)
        assert fault.source
        assert fault.needs <= CAPABILITIES
        assert kind_of(fault) in KINDS
        for beginning in fault.expected:
            assert any(code.startswith(beginning) for code in codes), beginning


def test_a_changed_target_is_an_error() -> None:
    with (
        pytest.raises(FaultTargetError, match="0 times, not once"),
        plant(made(Patch(f"{QUEUE}.push", "heapq.heappush(self._other", "pass"))),
    ):
        pass
    with (
        pytest.raises(FaultTargetError, match="3 times, not once"),
        plant(made(Patch(f"{QUEUE}.remove", "self._heap", "self._heap"))),
    ):
        pass


@pytest.mark.parametrize("target", [f"{QUEUE}.missing", "preempt_engine.missing:function"])
def test_a_missing_target_is_an_error(target: str) -> None:
    with (
        pytest.raises(FaultTargetError, match="does not exist"),
        plant(made(Patch(target, "", ""))),
    ):
        pass


def test_two_faults_of_one_module_exclude_each_other() -> None:
    fault = made(Patch(f"{QUEUE}.peek", "return", "return"))
    with plant(fault), pytest.raises(FaultTargetError, match="has a fault already"), plant(fault):
        pass


def test_a_failing_test_takes_its_fault_with_it() -> None:
    before = WaitingQueue.peek.__code__
    with pytest.raises(RuntimeError), plant(made(Patch(f"{QUEUE}.peek", "return", "return"))):
        raise RuntimeError
    assert WaitingQueue.peek.__code__ is before


def test_a_faulty_line_counts_when_it_runs() -> None:
    first: list[str] = []
    fault = made(Patch(f"{QUEUE}.__len__", "return len(self._heap)", "return 7"))
    with plant(fault, on_first=lambda: first.append("reached")) as planted:
        queue = WaitingQueue()
        assert planted.num_reached == 0
        assert [len(queue), len(queue)] == [7, 7]
    assert planted.num_reached == 2
    assert first == ["reached"]
    assert len(queue) == 0


def test_a_conditional_fault_counts_when_its_condition_holds() -> None:
    fault = made(
        Patch(
            f"{QUEUE}.__len__",
            "return len(self._heap)",
            "return 9 if self._heap and reached() else 0",
        )
    )
    with plant(fault) as planted:
        queue = WaitingQueue()
        assert len(queue) == 0
        assert planted.num_reached == 0
        queue._heap.append((0, None))  # type: ignore[arg-type]
        assert len(queue) == 9
    assert planted.num_reached == 1


def test_lines_are_indented_like_the_place() -> None:
    fault = made(
        Patch(
            "preempt_engine.block_manager:BlockManager.find_prefix",
            "hits.append(block_id)",
            "if index == 0:\n    hits.append(block_id)",
        )
    )
    prompt = list(range(4, 30))
    with plant(fault), LLM("exact", num_kv_blocks=16, block_size=4) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=1)
        llm.generate(prompt, params, use_tqdm=False)
        (output,) = llm.generate(prompt, params, use_tqdm=False)
    assert output.num_cached_tokens == 4


def test_faults_are_selected_by_name_and_by_kind() -> None:
    assert [fault.name for fault in select_faults("digest-too-short")] == ["digest-too-short"]
    assert {kind_of(fault) for fault in select_faults("tables/*,numbers/*")} == {
        "tables",
        "numbers",
    }
    with pytest.raises(UnknownFaultError, match="No fault fits 'nothing'"):
        select_faults("digest-*,nothing")
    with pytest.raises(UnknownFaultError, match="'nothing' is unknown"):
        fault_named("nothing")


def _targets(fault: Fault) -> list[FunctionType]:
    return [target_of(fault, patch.target) for patch in fault.patches]


@pytest.mark.parametrize(
    "name", ["second-rank-keeps-its-table", "second-rank-has-another-block-size"]
)
def test_a_fault_of_another_rank_is_planted_there(name: str) -> None:
    harness = PreemptHarness(EmbeddedAdapter(), {"model": "exact", "tensor_parallel_size": 2})
    workload = harness.workload(requests=3, prompt_tokens=9, max_tokens=24)
    with planted_everywhere(fault_named(name)) as num_reached:
        result = harness.run(workload, "tight", block_size=4, enable_prefix_caching=False)
        assert num_reached() >= 1
    assert result.findings or result.verdict is not Verdict.EQUAL
