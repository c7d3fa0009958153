"""Logits processors: their state follows the output of their sequence, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from naive_model import engine, generate_one, naive_greedy
from numpy.typing import NDArray
from state_trials import ChecksumLane, discourage_recent

from preempt_engine import SamplingParams
from preempt_engine.errors import LogitsProcessorError
from preempt_engine.sampling.history import ProcessorState

PROMPT = [3, 4, 5, 6]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
preemptions = st.lists(st.integers(1, 25), max_size=5, unique=True)


class Journal:
    """Writes down how it is used; copies share the journal."""

    def __init__(self, entries: list[object]) -> None:
        self.entries = entries

    def __deepcopy__(self, memo: dict[int, object]) -> Journal:
        self.entries.append("copy")
        return Journal(self.entries)

    def reset(self, prompt_token_ids: Sequence[int]) -> None:
        self.entries.append(list(prompt_token_ids))

    def accept(self, token_id: int) -> None:
        self.entries.append(token_id)

    def process(self, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        return scores


@given(preempt_at=preemptions)
def test_a_processor_with_state_gives_the_same_under_preemption(preempt_at: list[int]) -> None:
    def change(scores: list[float], output: list[int]) -> list[float]:
        checksum = 1
        for token_id in [*PROMPT, *output]:
            checksum = (checksum * 31 + token_id + 1) % 65_521
        return [
            -math.inf if token_id % 2 == checksum % 2 else score
            for token_id, score in enumerate(scores)
        ]

    params = replace(GREEDY, logits_processors=[ChecksumLane()])
    output = generate_one(engine(preempt_at), PROMPT, params)
    assert output.outputs[0].token_ids == naive_greedy(PROMPT, 12, change)


@given(preempt_at=preemptions)
def test_a_function_sees_the_whole_output_and_may_keep_it(preempt_at: list[int]) -> None:
    seen: list[list[int]] = []

    def spy(output_token_ids: list[int], scores: Any) -> Any:
        seen.append(output_token_ids)
        return discourage_recent(output_token_ids, scores)

    output = generate_one(engine(preempt_at), PROMPT, replace(GREEDY, logits_processors=[spy]))
    token_ids = output.outputs[0].token_ids
    assert token_ids == naive_greedy(PROMPT, 12, lambda s, o: list(discourage_recent(o, s)))
    assert seen == [token_ids[:length] for length in range(12)]


def test_after_a_preemption_the_output_is_replayed_once() -> None:
    entries: list[object] = []
    params = replace(GREEDY, max_tokens=4, logits_processors=[Journal(entries)])
    # Steps 0 and 1 give two tokens; before step 2 the request loses its blocks.
    output = generate_one(engine([2]), PROMPT, params, preempted=True)
    a, b, c, _ = output.outputs[0].token_ids
    assert entries == ["copy", PROMPT, a, "copy", PROMPT, a, b, c]


def test_requests_that_share_an_object_share_no_state() -> None:
    shared = ChecksumLane()
    params = replace(GREEDY, logits_processors=[shared])
    prompts = [PROMPT, [9, 8, 7]]
    together = engine().generate(prompts, params, use_tqdm=False)
    alone = [generate_one(engine(), prompt, params) for prompt in prompts]
    assert [item["token_ids"] for item in together] == [item["token_ids"] for item in alone]
    assert shared.checksum == 1


@given(
    histories=st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=1, max_size=5),
)
def test_state_follows_any_history(histories: list[list[int]]) -> None:
    # Forks and tokens taken back: what counts is the history at the time, not the way to it.
    state = ProcessorState([ChecksumLane()], PROMPT)
    for history in histories:
        fresh = ProcessorState([ChecksumLane()], PROMPT)
        got = state.process(np.zeros(8), history)
        assert got.tolist() == fresh.process(np.zeros(8), history).tolist()


class Broken:
    """Raises where it is told to.

    Args:
        where: name of the method that raises, or "__deepcopy__".
    """

    def __init__(self, where: str) -> None:
        self.where = where

    def __deepcopy__(self, memo: dict[int, object]) -> Broken:
        self._maybe_raise("__deepcopy__")
        return Broken(self.where)

    def reset(self, prompt_token_ids: Sequence[int]) -> None:
        self._maybe_raise("reset")

    def accept(self, token_id: int) -> None:
        self._maybe_raise("accept")

    def process(self, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        self._maybe_raise("process")
        return scores

    def _maybe_raise(self, method: str) -> None:
        if method == self.where:
            raise KeyError("mine")


@pytest.mark.parametrize("where", ["__deepcopy__", "reset", "accept", "process"])
def test_an_exception_ends_the_request_by_name_and_not_its_neighbour(where: str) -> None:
    params = [replace(GREEDY, logits_processors=[Broken(where)]), GREEDY]
    llm = engine()
    broken, other = llm.generate([PROMPT, PROMPT], params, use_tqdm=False)
    assert isinstance(broken.error, LogitsProcessorError)
    assert "Broken raised KeyError: 'mine'" in str(broken.error)
    assert isinstance(broken.error.__cause__, KeyError)
    assert len(broken.outputs[0].token_ids) == (1 if where == "accept" else 0)
    assert other["token_ids"] == generate_one(engine(), PROMPT, GREEDY)["token_ids"]
    assert llm.scheduler.pool_counts().used == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_scores_that_mean_nothing_are_an_error(bad: float) -> None:
    def nonsense(output_token_ids: list[int], scores: Any) -> Any:
        scores[5] = bad
        return scores

    output = generate_one(engine(), PROMPT, replace(GREEDY, logits_processors=[nonsense]))
    assert "nonsense returned scores" in str(output.error)


def test_a_processor_cannot_lift_a_ban() -> None:
    def favour(output_token_ids: list[int], scores: Any) -> Any:
        return np.where(np.arange(scores.size) == 9, 1e6, scores)

    params = replace(
        GREEDY,
        bad_words=[engine().tokenizer.decode([9])],  # type: ignore[union-attr]
        logits_processors=[favour],
    )
    assert 9 not in generate_one(engine(), PROMPT, params)["token_ids"]
