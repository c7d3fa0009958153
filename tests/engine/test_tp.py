"""Tensor parallelism: preemption changes no output, and every rank is seen."""

from __future__ import annotations

import random

import pytest

from preempt_engine import LLM, SamplingParams
from preempt_engine.exact import ExactCache, combine_digests, reference_generate
from preempt_engine.observer import EngineObserver
from preempt_engine.step import SequenceKey
from preempt_harness.adapters.embedded import EmbeddedAdapter
from preempt_harness.adapters.protocol import TENSOR_PARALLEL, EngineSettings
from preempt_harness.record import Computed, StepSent
from preempt_harness.workload import RequestSpec


def test_ranks_share_a_digest_and_one_rank_is_the_digest() -> None:
    shares = []
    for rank in range(3):
        cache = ExactCache(num_blocks=2, block_size=2, salt=rank)
        cache.write("a", 0, [7, 8, 9], [2, 3, 0], [1, 0])
        shares.append(cache.read("a", 3, [1, 0], 0))
    assert combine_digests(shares[:1]) == shares[0]
    for num_ranks in (1, 2, 3):
        (token_id,) = reference_generate([7, 8, 9], 1, 64, num_ranks=num_ranks)
        assert token_id == combine_digests(shares[:num_ranks])[-1] % 64


def test_preemption_changes_no_output_of_two_exact_ranks() -> None:
    """Drawn workloads; blocks are held so that each runs once with room and once without."""
    rng = random.Random(5)
    num_preemptions = 0
    with LLM("exact", tensor_parallel_size=2, num_kv_blocks=64, block_size=4) as llm:
        for _ in range(40):
            prompts = [
                [rng.randrange(1, 64) for _ in range(rng.randrange(1, 14))]
                for _ in range(rng.randrange(2, 5))
            ]
            params = SamplingParams(
                temperature=0.0, max_tokens=rng.randrange(2, 16), ignore_eos=True
            )
            wanted = [
                reference_generate(prompt, params.max_tokens, 64, num_ranks=2) for prompt in prompts
            ]
            for blocks in (64, rng.randrange(8, 12)):
                llm.hold_blocks(64 - blocks)
                outputs = llm.generate(prompts, params, use_tqdm=False)
                assert [output["token_ids"] for output in outputs] == wanted
                assert blocks < 64 or llm.counters.num_preemptions == 0
                num_preemptions += llm.counters.num_preemptions
                llm.hold_blocks(0)
                llm.reset()
    assert num_preemptions > 10


class _WorkerView(EngineObserver):
    def __init__(self) -> None:
        self.seen: dict[int, list[tuple[object, ...]]] = {}

    def computed(  # type: ignore[override]
        self, step_id: int, rank: int, key: SequenceKey, *rest: object
    ) -> None:
        self.seen.setdefault(rank, []).append((step_id, key, *rest))

    def blocks_poisoned(self, step_id: int, rank: int, block_ids: object) -> None:
        self.seen.setdefault(rank, []).append((step_id, block_ids))


def test_each_rank_reports_what_a_single_rank_would() -> None:
    """Ranks see the same steps, so the worker's view differs in nothing but the rank."""
    views = {}
    for num_ranks in (1, 2):
        # Sampling by the seed alone would give other tokens: another number of ranks is another
        # exact model. The prompt makes up the whole workload.
        params = SamplingParams(temperature=0.0, max_tokens=1)
        view = _WorkerView()
        with LLM(
            "exact",
            tensor_parallel_size=num_ranks,
            num_kv_blocks=8,
            block_size=4,
            max_num_batched_tokens=9,
            poison=True,
            observer=view,
        ) as llm:
            for _ in range(2):
                llm.generate([[1] * 11, [2] * 12, [3] * 3], params, use_tqdm=False)
        views[num_ranks] = view.seen
    assert views[2][0] == views[2][1] == views[1][0]
    assert sorted(views[2]) == [0, 1]


def test_workers_report_nothing_when_nobody_observes() -> None:
    """Without an observer the answers carry no reports; with one that is set later, they do."""
    view = _WorkerView()
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    with LLM("exact", tensor_parallel_size=2) as llm:
        llm.generate([[1, 2]], params, use_tqdm=False)
        llm.set_observer(view)
        llm.generate([[1, 2]], params, use_tqdm=False)
        llm.set_observer(None)
        llm.generate([[1, 2]], params, use_tqdm=False)
    assert {step[0] for step in view.seen[1]} == {2, 3}


def test_the_embedded_adapter_shows_messages_and_computation_of_every_rank() -> None:
    adapter = EmbeddedAdapter()
    assert TENSOR_PARALLEL in adapter.capabilities
    session = adapter.open(EngineSettings(num_blocks=16, block_size=4, tensor_parallel_size=2))
    session.submit(RequestSpec(id="a", prompt_token_ids=[1, 2, 3]))
    events = []
    while session.unfinished():
        events += session.poll(1.0)
    events += session.close()
    assert session.info.num_ranks == 2
    assert "StepSent" in session.info.observed
    sent = [event for event in events if isinstance(event, StepSent)]
    assert {event.rank for event in sent} == {0, 1}
    assert max(event.num_bytes for event in sent if event.step > 0) <= 64 + 16
    assert {event.rank for event in events if isinstance(event, Computed)} == {0, 1}
    single = adapter.open(EngineSettings(num_blocks=16))
    assert "StepSent" not in single.info.observed
    single.close()


def test_a_sampled_request_gives_the_same_tokens_when_it_is_preempted() -> None:
    params = SamplingParams(temperature=0.8, top_k=20, seed=3, max_tokens=16, ignore_eos=True)
    prompts = [[1] * 9, [2] * 9, [3] * 9]
    with LLM("exact", tensor_parallel_size=2, num_kv_blocks=64, block_size=4) as llm:
        runs = []
        for held in (0, 52):
            llm.hold_blocks(held)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            runs.append([output["token_ids"] for output in outputs])
            num_preemptions = llm.counters.num_preemptions
            llm.hold_blocks(0)
            llm.reset()
    assert num_preemptions > 0
    assert runs[0] == runs[1]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_scores_are_those_of_the_combined_digest(num_ranks: int) -> None:
    continuation = reference_generate([4, 5], 6, 64, num_ranks=num_ranks)
    with LLM("exact", tensor_parallel_size=num_ranks) as llm:
        scores = llm.score([4, 5], continuation)
    assert [score.top_token_id for score in scores] == continuation
