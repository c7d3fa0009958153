"""Captured decode steps, replayed at padded sizes; on a CPU by a stand-in for CUDA graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from static_decode import EagerCapture, StaticTorchAttention
from tiny_models import (
    Driver,
    RecordingObserver,
    family_configs,
    make_runner,
    random_tokens,
    save_checkpoint,
)

from preempt_engine import LLM, SamplingParams
from preempt_engine.attention.torch_paged import TorchPagedAttention
from preempt_engine.config import EngineConfig
from preempt_engine.layers.parallel import SingleRank
from preempt_engine.layers.row_plan import RowPlan
from preempt_engine.worker import decode_graphs, model_runner
from preempt_engine.worker.graph_sizes import graph_sizes, size_for
from preempt_engine.worker.model_runner import ModelRunner

pytestmark = pytest.mark.usefixtures("one_torch_thread")

# Between ways of computing the same float32 logits; origin in test_models_parity.py.
_TOLERANCE = 1e-4
Rows = dict[str, list[NDArray[np.float32]]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directories = {}
    for family in ("llama", "mistral-window", "opt"):
        directories[family] = tmp_path_factory.mktemp(family)
        save_checkpoint(family_configs()[family], directories[family])
    return directories


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> EagerCapture:
    """Decode steps are captured on this CPU, by the stand-in."""
    capture = EagerCapture()

    def select(config: EngineConfig, device: torch.device, **kwargs: Any) -> StaticTorchAttention:
        return StaticTorchAttention(kwargs["scale"])

    def unusable(config: EngineConfig, *_: object) -> str:
        return "asked for" if config.enforce_eager else ""

    monkeypatch.setattr(model_runner, "select_backend", select)
    monkeypatch.setattr(decode_graphs, "unusable", unusable)
    monkeypatch.setattr(decode_graphs, "CudaCapture", lambda device: capture)
    return capture


# Sizes -----------------------------------------------------------------------------------------


@given(
    max_num_seqs=st.integers(1, 600),
    multiple=st.sampled_from([1, 8, 16, 64]),
    data=st.data(),
)
def test_every_number_of_sequences_has_a_size(
    max_num_seqs: int, multiple: int, data: st.DataObject
) -> None:
    row_plan = RowPlan(multiple)
    sizes = graph_sizes(max_num_seqs, row_plan)
    count = data.draw(st.integers(1, max_num_seqs))
    size = size_for(count, sizes)
    assert row_plan.padded(count) <= size <= sizes[-1] == row_plan.padded(max_num_seqs)
    assert all(size % multiple == 0 for size in sizes)
    assert list(sizes) == sorted(set(sizes))


def test_small_sizes_are_exact_and_the_largest_is_the_maximum() -> None:
    assert graph_sizes(1, RowPlan(1)) == (1,)
    assert graph_sizes(20, RowPlan(1)) == (1, 2, 4, 8, 16, 20)
    assert graph_sizes(20, RowPlan(8)) == (8, 16, 24)


# When steps are captured -----------------------------------------------------------------------


def test_steps_are_captured_on_a_gpu_by_a_backend_that_can() -> None:
    gpu, rank = torch.device("cuda"), SingleRank()
    backend, config = StaticTorchAttention(1.0), EngineConfig(model="m")
    assert decode_graphs.unusable(config, gpu, backend, rank) == ""
    eager = EngineConfig(model="m", enforce_eager=True)
    assert "enforce_eager" in decode_graphs.unusable(eager, gpu, backend, rank)
    assert "CUDA" in decode_graphs.unusable(config, torch.device("cpu"), backend, rank)
    assert "'torch'" in decode_graphs.unusable(config, gpu, TorchPagedAttention(1.0), rank)
    ranks = SingleRank()
    ranks.size = 2
    assert "ranks" in decode_graphs.unusable(config, gpu, backend, ranks)


# Replays ---------------------------------------------------------------------------------------


def _serve(runner: ModelRunner) -> tuple[Rows, Driver]:
    """Sequences come, decode in batches of every size, are preempted between, and go."""
    driver = Driver(runner)
    prompts = {f"s{i}": random_tokens(3 + 5 * i, seed=i) for i in range(5)}
    keys = {
        name: driver.add(name, tokens + random_tokens(12, 50)) for name, tokens in prompts.items()
    }
    rows: Rows = {name: [] for name in keys}

    def step(ends: dict[str, int]) -> None:
        given = driver.run({keys[name]: end for name, end in ends.items()}, every=False)
        for name, row in zip(ends, given, strict=True):
            rows[name].append(row)

    done = {name: len(tokens) for name, tokens in prompts.items()}
    names = list(keys)
    for count in (1, 2, 3, 5, 4, 2):
        batch = names[:count]
        for name in batch:
            if not driver.sequences[keys[name]].num_computed:
                step({name: done[name]})  # prefill, or again after a preemption
        for _ in range(2):
            done |= {name: done[name] + 1 for name in batch}
            step({name: done[name] for name in batch})
        driver.preempt(keys[batch[-1]], poison=True)
        driver.preempt(keys[batch[0]], poison=True)
    return rows, driver


@pytest.mark.parametrize("family", ["llama", "mistral-window", "opt"])
def test_replays_of_every_size_compute_what_eager_steps_do(
    family: str, checkpoints: dict[str, Path], capture: EagerCapture
) -> None:
    runner = make_runner(checkpoints[family], max_num_seqs=5)
    assert capture.captured == [5, 4, 2, 1]
    rows, _ = _serve(runner)
    assert set(capture.replayed) == {1, 2, 4, 5}
    eager, _ = _serve(make_runner(checkpoints[family], max_num_seqs=5, enforce_eager=True))
    for name, expected in eager.items():
        np.testing.assert_allclose(
            np.stack(rows[name]), np.stack(expected), rtol=0, atol=_TOLERANCE
        )


def test_prefills_chunks_and_mixed_steps_are_not_replayed(
    checkpoints: dict[str, Path], capture: EagerCapture
) -> None:
    driver = Driver(make_runner(checkpoints["llama"], max_num_seqs=4))
    a, b = driver.add("a", random_tokens(9, 0)), driver.add("b", random_tokens(9, 1))
    driver.run({a: 5})
    driver.run({a: 6, b: 3})
    assert capture.replayed == []
    driver.run({a: 7, b: 4})
    assert capture.replayed == [2]


def test_padding_rows_write_to_the_reserved_block_only(
    checkpoints: dict[str, Path], capture: EagerCapture
) -> None:
    runner = make_runner(checkpoints["llama"], max_num_seqs=4)
    driver = Driver(runner)
    keys = [driver.add(f"s{i}", random_tokens(9, i)) for i in range(4)]
    driver.run(dict.fromkeys(keys, 5))
    driver.run(dict.fromkeys(keys, 6))  # fills all four rows
    for key in keys[3:]:
        driver.preempt(key)
    assert _blocks_changed_by(driver, dict.fromkeys(keys[:3], 7)) == {
        *(driver.sequences[key].block_table[-1] for key in keys[:3]),
        runner.num_kv_blocks,
    }
    assert capture.replayed == [4, 4]


def test_padding_that_is_not_renewed_would_write_to_blocks_of_others(
    checkpoints: dict[str, Path], capture: EagerCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control of the test above: rows that keep a preempted sequence's slot."""
    runner = make_runner(checkpoints["llama"], max_num_seqs=4)
    driver = Driver(runner)
    keys = [driver.add(f"s{i}", random_tokens(9, i)) for i in range(4)]
    driver.run(dict.fromkeys(keys, 5))
    driver.run(dict.fromkeys(keys, 6))
    victim_block = driver.sequences[keys[3]].block_table[-1]
    driver.preempt(keys[3], poison=True)
    monkeypatch.setattr(decode_graphs.DecodeGraphs, "_pad", lambda *_: None)
    assert victim_block in _blocks_changed_by(driver, dict.fromkeys(keys[:3], 7))


def _blocks_changed_by(driver: Driver, ends: dict[Any, int]) -> set[int]:
    """Blocks whose content is another after one step (poison aside, which comes first)."""
    cache = driver.runner._kv_cache
    assert cache is not None
    driver.run({})  # drops and poisons what is pending
    before = cache.pool.clone()
    driver.run(ends)
    changed = (cache.pool != before).any(5).any(4).any(3).any(1).any(0)
    return set(changed.nonzero().flatten().tolist())


def test_the_observer_is_told_what_lies_in_the_captured_memory(
    checkpoints: dict[str, Path], capture: EagerCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(checkpoints["llama"], max_num_seqs=4)
    runner.observer = observer = RecordingObserver()
    driver = Driver(runner, block_order=[9, 2, 7, 0, 30])
    a, b = driver.add("a", [11, 12, 13, 14, 15, 16]), driver.add("b", [21, 22, 23])
    driver.run({a: 5, b: 2})
    driver.run({b: 3, a: 6})
    assert observer.events[-2:] == [
        ("computed", 1, 0, b, 2, [23], [30], [7], 3),
        ("computed", 1, 0, a, 5, [16], [9], [9, 2], 6),
    ]
    # A step whose numbers do not reach the captured memory shows.
    c, d = driver.add("c", [1]), driver.add("d", [2])
    monkeypatch.setattr(runner.graphs, "fill", lambda inputs: None)
    driver.run({c: 1, d: 1})
    assert observer.events[-2:] == [
        ("computed", 2, 0, c, 2, [23], [30], [7], 3),
        ("computed", 2, 0, d, 5, [16], [9], [9, 2], 6),
    ]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_an_engine_short_of_blocks_gives_the_same_output_with_captured_steps(
    mode: str, checkpoints: dict[str, Path], capture: EagerCapture
) -> None:
    """Requests preempt each other, so replays of changing sizes lie between their preemptions."""
    prompts = [random_tokens(4 + 3 * i, seed=i) for i in range(5)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    outputs = []
    for eager in (True, False):
        with LLM(
            str(checkpoints["llama"]),
            device="cpu",
            block_size=4,
            num_kv_blocks=16,
            max_num_seqs=5,
            enforce_eager=eager,
            preemption_mode=mode,
            swap_space_blocks=16,
            poison=True,
            skip_tokenizer_init=True,
        ) as llm:
            results = llm.generate(prompts, params)
        assert sum(result.num_preemptions for result in results) > 0
        outputs.append([result.outputs[0].token_ids for result in results])
    assert outputs[0] == outputs[1]
    assert len(set(capture.replayed)) > 1
