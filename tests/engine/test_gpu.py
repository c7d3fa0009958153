"""What only a GPU can show: bits on CUDA, graphs that are really replayed, nobody who waits.

Run by `make gpu`; docs/gpu.md says on which hardware.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attention_batches import Heads, lay_out, random_sequence
from numpy.typing import NDArray
from tiny_models import Driver, family_configs, make_runner, random_tokens, save_checkpoint

from preempt_engine import LLM, SamplingParams
from preempt_engine.attention.protocol import DecodeBuffers
from preempt_engine.worker.model_runner import ModelRunner
from preempt_engine.worker.step_inputs import build_step_inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

Row = NDArray[np.float32]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3")
    save_checkpoint(family_configs()["qwen3"], directory)
    return directory


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def _runner(checkpoint: Path, **kwargs: Any) -> ModelRunner:
    settings = {"device": "cuda", "dtype": "float32", "num_kv_blocks": 160}
    return make_runner(checkpoint, **(settings | kwargs))


def _rows(runner: ModelRunner, schedule: str) -> list[Row]:
    """Logits of every position of one prompt, alone or beside others, whole or in pieces."""
    driver = Driver(runner)
    prompt = random_tokens(70, 0)
    key = driver.add("a", prompt)
    if schedule == "whole":
        return driver.run({key: 70})
    other, third = driver.add("b", random_tokens(60, 1)), driver.add("c", random_tokens(40, 2))
    if schedule == "chunks":
        ends = ({key: 9}, {other: 60, key: 40}, {third: 3, key: 69}, {key: 70})
        return [row for step in ends for row in _own(driver, key, step)]
    if schedule == "preempted":
        driver.run({key: 50, third: 20})
        driver.preempt(key, poison=True)
        driver.run({other: 60})
        return _own(driver, key, {third: 21, key: 33}) + _own(driver, key, {key: 70})
    return [row for end in range(1, 71) for row in _own(driver, key, {key: end})]


def _own(driver: Driver, key: Any, ends: dict[Any, int]) -> list[Row]:
    starts = {item: driver.sequences[item].num_computed for item in ends}
    rows = iter(driver.run(ends))
    by_key = {item: [next(rows) for _ in range(ends[item] - starts[item])] for item in ends}
    return by_key[key]


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_logits_have_the_same_bits_whatever_the_schedule(
    dtype: str, backend: str, eager: bool, checkpoint: Path
) -> None:
    runner = _runner(
        checkpoint,
        dtype=dtype,
        attention_backend=backend,
        deterministic=True,
        enforce_eager=eager,
        max_num_seqs=8,
    )
    expected = np.stack(_rows(runner, "whole"))
    for schedule in ("chunks", "preempted", "decode"):
        runner.reset()
        assert np.array_equal(np.stack(_rows(runner, schedule)), expected), schedule


def test_block_size_does_not_matter_to_the_bits(checkpoint: Path) -> None:
    rows = [
        np.stack(_rows(_runner(checkpoint, deterministic=True, block_size=size), "decode"))
        for size in (1, 3, 64)
    ]
    assert np.array_equal(rows[0], rows[1])
    assert np.array_equal(rows[0], rows[2])


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_replayed_steps_give_the_output_of_eager_ones_under_preemption(
    mode: str, checkpoint: Path
) -> None:
    prompts = [random_tokens(4 + 3 * i, seed=i) for i in range(9)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    outputs = []
    for eager in (True, False):
        with LLM(
            str(checkpoint),
            device="cuda",
            dtype="float32",
            deterministic=True,
            block_size=4,
            num_kv_blocks=40,
            max_num_seqs=9,
            enforce_eager=eager,
            preemption_mode=mode,
            swap_space_blocks=40,
            poison=True,
            skip_tokenizer_init=True,
        ) as llm:
            results = llm.generate(prompts, params)
        assert sum(result.num_preemptions for result in results) > 0
        outputs.append([result.outputs[0].token_ids for result in results])
    assert outputs[0] == outputs[1]


def test_every_size_is_captured_and_the_largest_number_of_sequences_is_replayed(
    checkpoint: Path,
) -> None:
    runner = _runner(checkpoint, max_num_seqs=11)
    assert runner.graphs is not None
    assert runner.graphs.sizes == (1, 2, 4, 8, 11)
    eager = _runner(checkpoint, max_num_seqs=11, enforce_eager=True)
    for count in (11, 3, 8, 1):
        rows = []
        for each in (runner, eager):
            each.reset()
            driver = Driver(each)
            keys = [driver.add(f"s{i}", random_tokens(9, i)) for i in range(count)]
            driver.run(dict.fromkeys(keys, 5))
            rows.append(np.stack(driver.run(dict.fromkeys(keys, 6))))
        # Between ways of computing the same float32 logits; origin in test_models_parity.py.
        np.testing.assert_allclose(rows[0], rows[1], rtol=0, atol=1e-4)


@pytest.mark.usefixtures("no_waiting")
def test_the_inputs_of_a_step_are_prepared_without_waiting(checkpoint: Path) -> None:
    torch.cuda.set_sync_debug_mode("default")
    runner = _runner(checkpoint, max_num_seqs=4)
    driver = Driver(runner)
    keys = [driver.add(f"s{i}", random_tokens(9, i)) for i in range(3)]
    steps: list[Any] = []
    execute = runner.execute
    runner.execute = lambda step: steps.append(step) or execute(step)  # type: ignore[method-assign,func-returns-value]
    driver.run(dict.fromkeys(keys, 5))
    driver.run(dict.fromkeys(keys, 6))
    torch.cuda.set_sync_debug_mode("error")
    with torch.inference_mode():
        for step in steps:
            inputs = build_step_inputs(step, runner.state, runner.device, runner.row_plan)
            runner._attention.plan(inputs.metadata)
        assert runner.graphs is not None
        runner.graphs.fill(inputs)
        runner.graphs.replay(3)


@pytest.mark.skipif(
    importlib.util.find_spec("flash_attn") is None, reason="flash-attn is not installed"
)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(
    "chunks", [[(0, 300)], [(200, 520)], [(4, 5), (599, 600), (0, 1)], [(0, 5), (300, 301)]]
)
def test_flash_attention_equals_dense_attention(
    chunks: list[tuple[int, int]], window: int | None
) -> None:
    from preempt_engine.attention.flash import FlashAttention, FlashFunctions

    heads, device = Heads(8, 2, 64), torch.device("cuda")
    sequences = [random_sequence(end, heads, seed) for seed, (_, end) in enumerate(chunks)]
    batch = lay_out(sequences, chunks, 256, window=window, dtype=torch.bfloat16, device=device)
    backend = FlashAttention(heads.scale, FlashFunctions.installed())
    plan = backend.plan(batch.metadata)
    plan.write_kv(batch.cache, batch.key, batch.value)
    output = plan.attend(batch.query, batch.cache, window)
    # Weights and outputs are rounded to bfloat16, 8 bits, on the way: 2 ** -7 of magnitude 4.
    torch.testing.assert_close(output.float(), batch.expected, rtol=2**-7, atol=2**-5)
    if all(end - start == 1 for start, end in chunks):
        read_lens = torch.tensor(batch.metadata.read_lens, dtype=torch.int32, device=device)
        buffers = DecodeBuffers(
            batch.metadata.slot_mapping, batch.metadata.block_tables, read_lens, 256
        )
        fixed = backend.plan_decode(buffers).attend(batch.query, batch.cache, window)
        torch.testing.assert_close(fixed, output)
