"""One worker with a real model, driven by hand-made steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny_models import (
    Driver,
    RecordingObserver,
    family_configs,
    make_runner,
    random_tokens,
    save_checkpoint,
)

from preempt_engine.config import EngineConfig
from preempt_engine.errors import ConfigError, EngineClosedError
from preempt_engine.models.config import ModelConfig
from preempt_engine.step import ScheduledSequence, SchedulerOutput, SequenceKey
from preempt_engine.worker.kv_cache import (
    POISON,
    KVCache,
    bytes_per_block,
    choose_num_blocks,
)
from preempt_engine.worker.model_runner import ModelRunner, choose_device, choose_dtype
from preempt_engine.worker.torch_logits import TorchLogits

pytestmark = pytest.mark.usefixtures("one_torch_thread")

_CPU = torch.device("cpu")
Row = NDArray[np.float32]
# Between ways of computing the same float32 logits; origin in test_models_parity.py.
_TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    save_checkpoint(family_configs()["llama"], directory)
    return directory


def _rows_alone(checkpoint: Path, tokens: list[int]) -> Row:
    driver = Driver(make_runner(checkpoint))
    return np.stack(driver.run({driver.add("alone", tokens): len(tokens)}))


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_chunks_through_scattered_blocks_compute_what_one_prefill_does(
    block_size: int, checkpoint: Path
) -> None:
    runner = make_runner(checkpoint, block_size=block_size)
    order = np.random.default_rng(0).permutation(runner.num_kv_blocks).tolist()
    driver = Driver(runner, order)
    prompts = {f"s{n}": random_tokens(n, seed=n) for n in (9, 14, 2)}
    keys = [driver.add(name, tokens) for name, tokens in prompts.items()]
    a, b, c = keys
    rows: dict[SequenceKey, list[Row]] = {key: [] for key in keys}
    for ends in ({a: 4}, {b: 5, a: 5}, {c: 2, b: 6}, {a: 9, b: 14}):
        starts = {key: driver.sequences[key].num_computed for key in ends}
        step_rows = iter(driver.run(ends))
        for key, end in ends.items():
            rows[key] += [next(step_rows) for _ in range(end - starts[key])]
    for key in keys:
        expected = _rows_alone(checkpoint, prompts[key.request_id])
        np.testing.assert_allclose(np.stack(rows[key]), expected, rtol=0, atol=_TOLERANCE)


def test_only_the_requested_rows_are_returned_in_order(checkpoint: Path) -> None:
    driver = Driver(make_runner(checkpoint))
    first, second = random_tokens(6, 1), random_tokens(9, 2)
    rows = driver.run({driver.add("a", first): 6, driver.add("b", second): 9}, every=False)
    assert len(rows) == 2
    np.testing.assert_allclose(rows[0], _rows_alone(checkpoint, first)[-1], atol=_TOLERANCE)
    np.testing.assert_allclose(rows[1], _rows_alone(checkpoint, second)[-1], atol=_TOLERANCE)


def test_a_chunk_whose_logits_nobody_needs_returns_no_rows(checkpoint: Path) -> None:
    runner = make_runner(checkpoint)
    driver = Driver(runner)
    key = driver.add("a", random_tokens(8, 0))
    driver.run({key: 1})
    chunk = ScheduledSequence(key, 1, 4, 4, False, [], [])
    assert runner.execute(SchedulerOutput(1, scheduled=[chunk])).num_rows == 0


def test_a_preempted_sequence_computed_again_has_the_same_logits(checkpoint: Path) -> None:
    tokens = random_tokens(12, 3)
    driver = Driver(make_runner(checkpoint))
    key = driver.add("a", tokens)
    driver.run({key: 10})
    driver.preempt(key, poison=True)
    driver.run({driver.add("bystander", random_tokens(11, 4)): 11})
    rows = np.stack(driver.run({key: 12}))
    np.testing.assert_allclose(rows, _rows_alone(checkpoint, tokens), rtol=0, atol=_TOLERANCE)


def test_reading_a_poisoned_block_changes_the_logits_and_keeps_them_finite(
    checkpoint: Path,
) -> None:
    tokens = random_tokens(12, 3)
    driver = Driver(make_runner(checkpoint))
    key = driver.add("a", tokens)
    driver.run({key: 11})
    driver.poison = [driver.sequences[key].block_table[0]]
    (row,) = driver.run({key: 12})
    assert np.isfinite(row).all()
    assert np.abs(row - _rows_alone(checkpoint, tokens)[-1]).max() > 1000 * _TOLERANCE


def test_a_copied_block_can_be_read_in_the_place_of_its_source(checkpoint: Path) -> None:
    tokens = random_tokens(12, 3)
    driver = Driver(make_runner(checkpoint))
    key = driver.add("a", tokens)
    driver.run({key: 11})
    table = driver.sequences[key].block_table
    spare = driver.free.pop()
    driver.copies = [(table[0], spare)]
    driver.run({})
    driver.poison = [table[0]]
    table[0] = spare
    driver.sequences[key].known = False  # send the new table
    driver.sequences[key].num_sent_tokens = driver.sequences[key].num_sent_blocks = 0
    (row,) = driver.run({key: 12})
    np.testing.assert_allclose(row, _rows_alone(checkpoint, tokens)[-1], atol=_TOLERANCE)


def test_a_step_without_sequences_still_drops_poisons_and_copies(checkpoint: Path) -> None:
    runner = make_runner(checkpoint)
    runner.observer = observer = RecordingObserver()
    driver = Driver(runner)
    key = driver.add("a", [1, 2, 3])
    driver.run({key: 3})
    observer.events.clear()
    step = SchedulerOutput(7, dropped=[key], poison_block_ids=[5, 6], block_copies=[(5, 2)])
    logits = runner.execute(step)
    assert (logits.num_rows, logits.vocab_size) == (0, runner.vocab_size)
    assert key not in runner.state.sequences
    assert observer.events == [("blocks_poisoned", 7, 0, [5, 6]), ("worker_copied", 7, 0, [(5, 2)])]


def test_the_observer_is_told_what_the_attention_backend_was_given(checkpoint: Path) -> None:
    observer = RecordingObserver()
    runner = make_runner(checkpoint, deterministic=True)  # pads the step's rows
    runner.observer = observer
    driver = Driver(runner, block_order=[9, 2, 7, 0, 30])
    a, b = driver.add("a", [11, 12, 13, 14, 15, 16]), driver.add("b", [21, 22])
    driver.run({a: 5})
    driver.run({b: 2, a: 6})
    assert observer.events == [
        ("computed", 0, 0, a, 0, [11, 12, 13, 14, 15], [36, 37, 38, 39, 8], [9, 2], 5),
        ("computed", 1, 0, b, 0, [21, 22], [28, 29], [7], 2),
        ("computed", 1, 0, a, 5, [16], [9], [9, 2], 6),
    ]


def test_reset_forgets_the_sequences_and_close_ends_the_runner(checkpoint: Path) -> None:
    runner = make_runner(checkpoint)
    driver = Driver(runner)
    driver.run({driver.add("a", [1, 2]): 2})
    runner.reset()
    assert runner.state.sequences == {}
    runner.close()
    runner.close()
    with pytest.raises(EngineClosedError):
        runner.execute(SchedulerOutput(1))


def test_the_model_reports_its_sizes(checkpoint: Path) -> None:
    runner = make_runner(checkpoint, max_model_len=100)
    assert (runner.vocab_size, runner.max_model_len, runner.num_kv_blocks) == (160, 100, 64)
    assert runner.eos_token_ids == {7}
    assert make_runner(checkpoint).max_model_len == 256


def test_a_length_beyond_the_positions_of_the_model_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len=257 exceeds the model's 256"):
        make_runner(checkpoint, max_model_len=257)


@pytest.mark.parametrize(
    ("checkpoint_dtype", "dtype", "device", "expected"),
    [
        ("bfloat16", "auto", "cpu", torch.float32),
        ("bfloat16", "auto", "cuda", torch.bfloat16),
        ("float16", "auto", "cuda", torch.float16),
        ("float32", "bfloat16", "cpu", torch.bfloat16),
    ],
)
def test_the_dtype_follows_checkpoint_and_device(
    checkpoint_dtype: str, dtype: str, device: str, expected: torch.dtype, tmp_path: Path
) -> None:
    config = family_configs()["llama"]
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = checkpoint_dtype
    config.save_pretrained(tmp_path)
    model = ModelConfig.from_directory(tmp_path)
    assert choose_dtype(dtype, model, torch.device(device)) == expected


def test_half_precision_on_a_cpu_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"float16.*float32.*bfloat16"):
        make_runner(checkpoint, dtype="float16")


def test_devices_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match="'warp' is unknown"):
        choose_device("warp")
    with pytest.raises(ConfigError, match="'meta' is not supported"):
        choose_device("meta")
    with pytest.raises(ConfigError, match="CUDA devices"):
        choose_device("cuda:99")


def test_the_pool_is_sized_by_memory(checkpoint: Path) -> None:
    model = ModelConfig.from_directory(checkpoint)
    # 2 layers x (keys, values) x 4 tokens x 2 heads x 12 x 4 bytes
    assert bytes_per_block(model, 4, torch.float32) == 2 * 2 * 4 * 2 * 12 * 4

    def blocks(**kwargs: int) -> int:
        config = EngineConfig(model=str(checkpoint), block_size=4, **kwargs)  # type: ignore[arg-type]
        return choose_num_blocks(config, model, torch.float32, _CPU)

    assert blocks(kv_cache_memory_bytes=10 * 1536 + 1535) == 10
    assert blocks() == 256 * 2**20 // 1536
    assert blocks(num_kv_blocks=3) == 3
    with pytest.raises(ConfigError, match=r"kv_cache_memory_bytes.*1536 bytes.*block_size"):
        blocks(kv_cache_memory_bytes=1535)


def test_a_pool_beyond_the_address_space_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="cannot hold"):
        make_runner(checkpoint, num_kv_blocks=2**50)


def test_copies_read_every_source_before_any_write(checkpoint: Path) -> None:
    model = ModelConfig.from_directory(checkpoint)
    cache = KVCache(model, num_blocks=4, block_size=2, dtype=torch.bfloat16, device=_CPU)
    for layer in cache.layers:
        for block in range(4):
            layer.key_blocks[block] = block + 1
            layer.value_blocks[block] = -block - 1
    cache.copy_blocks([(0, 1), (1, 2)])
    for layer in cache.layers:
        assert layer.key_blocks[:, 0, 0, 0].tolist() == [1, 1, 2, 4]
        assert layer.value_blocks[:, 0, 0, 0].tolist() == [-1, -1, -2, -4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_poison_fills_the_named_blocks_and_is_finite(dtype: torch.dtype, checkpoint: Path) -> None:
    model = ModelConfig.from_directory(checkpoint)
    cache = KVCache(model, num_blocks=3, block_size=2, dtype=dtype, device=_CPU)
    cache.poison([2])
    for layer in cache.layers:
        for blocks in (layer.key_blocks, layer.value_blocks):
            assert not blocks[:2].any()
            # 1e4 in bfloat16 is 9984: eight bits of mantissa
            assert blocks[2].isfinite().all()
            assert (blocks[2] - POISON).abs().max() < 0.01 * POISON


def test_the_lowest_id_wins_a_tie() -> None:
    logits = TorchLogits(torch.tensor([[0.0, 3.0, 3.0], [1.0, 1.0, 1.0], [0.0, 0.0, 2.0]]))
    assert logits.argmax([0, 1, 2]) == [1, 0, 2]
    assert logits.argmax([2, 0]) == [2, 1]
    assert logits.argmax([]) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_logits_is_a_float32_copy(dtype: torch.dtype) -> None:
    logits = TorchLogits(torch.ones(2, 3, dtype=dtype))
    row = logits.row(1)
    row[0] = 5
    assert row.dtype == np.float32
    assert logits.row(1).tolist() == [1, 1, 1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_gpu_computes_what_the_cpu_does(deterministic: bool, checkpoint: Path) -> None:
    tokens = random_tokens(20, 5)
    runner = make_runner(checkpoint, device="cuda", dtype="float32", deterministic=deterministic)
    driver = Driver(runner)
    key = driver.add("a", tokens)
    rows = driver.run({key: 9}) + driver.run({key: 10}) + driver.run({key: 20})
    np.testing.assert_allclose(
        np.stack(rows), _rows_alone(checkpoint, tokens), rtol=0, atol=_TOLERANCE
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_pool_of_a_gpu_is_sized_by_its_free_memory(checkpoint: Path) -> None:
    config = EngineConfig(model=str(checkpoint), device="cuda", gpu_memory_utilization=0.1)
    runner = ModelRunner(config)
    block = bytes_per_block(runner.model_config, config.block_size, runner.dtype)
    total = torch.cuda.mem_get_info()[1]
    assert 0 < runner.num_kv_blocks * block < 0.1 * total
