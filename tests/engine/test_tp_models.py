"""Real models on worker processes joined by gloo."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tiny_models import family_configs, random_tokens, save_checkpoint

from preempt_engine import LLM, SamplingParams
from preempt_engine.errors import ConfigError, WorkerDiedError, WorkerTimeoutError
from preempt_engine.observer import EngineObserver
from preempt_engine.step import SequenceKey

_PROMPTS = [random_tokens(5 + 3 * index, seed=index) for index in range(5)]
_SAMPLED = SamplingParams(temperature=0.9, top_k=30, max_tokens=16, logprobs=2, ignore_eos=True)
_GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
_POOL = {"num_kv_blocks": 64, "block_size": 4, "device": "cpu", "skip_tokenizer_init": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    save_checkpoint(family_configs()["llama"], directory)
    return directory


@pytest.fixture(scope="module")
def two_ranks(checkpoint: Path) -> Iterator[LLM]:
    with LLM(
        checkpoint,
        tensor_parallel_size=2,
        deterministic=True,
        debug_worker_state=True,
        poison=True,
        **_POOL,
    ) as llm:
        yield llm


def outputs_of(llm: LLM, params: SamplingParams, *, held: int = 0) -> tuple[list[object], int]:
    """What each request gave, log probabilities included, and how many preemptions it took."""
    llm.hold_blocks(held)
    outputs = llm.generate(_PROMPTS, params, use_tqdm=False)
    num_preemptions = llm.counters.num_preemptions
    llm.hold_blocks(0)
    llm.reset()
    return [(out["token_ids"], out.outputs[0].logprobs) for out in outputs], num_preemptions


@pytest.mark.parametrize("params", [_GREEDY, _SAMPLED], ids=["greedy", "sampled"])
def test_preemption_changes_no_bit_of_two_ranks(two_ranks: LLM, params: SamplingParams) -> None:
    roomy, none = outputs_of(two_ranks, params)
    tight, some = outputs_of(two_ranks, params, held=50)
    assert none == 0
    assert some > 0
    assert tight == roomy


def test_two_ranks_give_the_tokens_of_one(two_ranks: LLM, checkpoint: Path) -> None:
    """Sums are added in another order, so only tokens whose lead is clear need to agree; all of
    this seed's are."""
    with LLM(checkpoint, **_POOL) as single:
        assert outputs_of(single, _GREEDY)[0] == outputs_of(two_ranks, _GREEDY)[0]


def test_both_ranks_report_the_same_tables_slots_and_tokens(two_ranks: LLM) -> None:
    seen: dict[int, list[tuple[object, ...]]] = {}

    class View(EngineObserver):
        def computed(  # type: ignore[override]
            self, step_id: int, rank: int, key: SequenceKey, *rest: object
        ) -> None:
            seen.setdefault(rank, []).append((step_id, key, *rest))

    two_ranks.set_observer(View())
    outputs_of(two_ranks, _GREEDY, held=50)
    assert seen[0] == seen[1]


def test_scores_come_from_whole_rows(two_ranks: LLM) -> None:
    (token_ids, _), *_ = outputs_of(two_ranks, _GREEDY)[0]
    scores = two_ranks.score(_PROMPTS[0], token_ids)
    assert [score.top_token_id for score in scores] == token_ids
    two_ranks.reset()


@pytest.mark.parametrize(
    ("kind", "error_class"), [("kill", WorkerDiedError), ("stall", WorkerTimeoutError)]
)
def test_the_rank_at_fault_is_named_not_the_one_that_waits_for_it(
    checkpoint: Path, kind: str, error_class: type[WorkerDiedError | WorkerTimeoutError]
) -> None:
    """The other rank sits in a collective, or sees it fail, at the same time."""
    llm = LLM(
        checkpoint,
        tensor_parallel_size=2,
        worker_timeout_s=2.0,
        worker_hooks=(f"benchmarks.worker_faults:at_step:{kind} 1 3",),
        **_POOL,
    )
    processes = llm.worker_process_ids
    with pytest.raises(error_class) as caught:
        llm.generate(_PROMPTS, _GREEDY, use_tqdm=False)
    assert caught.value.rank == 1
    assert not any(psutil.pid_exists(pid) for pid in processes)


def test_a_model_that_cannot_be_divided_is_refused_before_any_worker_starts(
    checkpoint: Path,
) -> None:
    before = psutil.Process().children()
    with pytest.raises(ConfigError, match="num_attention_heads=4 is no multiple of 3"):
        LLM(checkpoint, tensor_parallel_size=3, **_POOL)
    assert psutil.Process().children() == before
