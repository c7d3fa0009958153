"""Beam search gives what transformers gives, whatever is preempted on the way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tiny_models import family_configs, random_tokens, save_checkpoint

from preempt_engine import LLM, BeamSearchParams
from preempt_engine.sequence import Request

NUM_PROMPTS = 7
# Scores are sums of at most 16 log probabilities, of which each side rounds its own logits in
# float32 (1e-5, see test_models_parity), and transformers the sum too.
_TOLERANCE = 1e-4


class EveryThirdStep:
    """Preempts the request that was admitted first."""

    def select_victims(self, step_id: int, running: Sequence[Request]) -> list[str]:
        return [request.request_id for request in running[:1] if step_id % 3 == 0]


def transformers_beams(
    model: Any, prompt: list[int], params: BeamSearchParams
) -> list[tuple[list[int], float]]:
    """(token ids, score) of every result, best first."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        max_new_tokens=params.max_tokens,
        do_sample=False,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=list(params.stop_token_ids) or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    lengths = (output.beam_indices >= 0).sum(dim=1).tolist()  # the rest is padding
    rows = output.sequences[:, len(prompt) :].tolist()
    return [
        (row[:length], score)
        for row, length, score in zip(rows, lengths, output.sequences_scores.tolist(), strict=True)
    ]


def draw_params(rng: Random, vocab_size: int) -> BeamSearchParams:
    return BeamSearchParams(
        beam_width=rng.choice([2, 3, 4]),
        max_tokens=rng.choice([1, 11, 16]),
        length_penalty=rng.choice([1.0, 0.0, 2.0, -0.5]),
        early_stopping=rng.choice([True, False, "never"]),
        ignore_eos=True,
        stop_token_ids=rng.sample(range(vocab_size), rng.choice([0, 1, 10])),
    )


@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "opt"])
def test_beams_are_those_of_transformers_although_they_are_preempted(
    family: str, mode: str, tmp_path: Path
) -> None:
    reference = save_checkpoint(family_configs()[family], tmp_path)
    rng = Random(family)
    prompts = [random_tokens(rng.randint(1, 30), seed=index) for index in range(NUM_PROMPTS)]
    params = [draw_params(rng, vocab_size=160) for _ in prompts]
    with LLM(
        str(tmp_path),
        device="cpu",
        preemption_controller=EveryThirdStep(),
        num_kv_blocks=40,
        block_size=4,
        poison=True,
        preemption_mode=mode,
        skip_tokenizer_init=True,
    ) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        llm.scheduler.check_integrity()
        assert llm.counters.num_preemptions
        assert (llm.counters.num_swapped_out_blocks > 0) == (mode == "swap")
    for prompt, given, output in zip(prompts, params, outputs, strict=True):
        expected = transformers_beams(reference, prompt, given)
        assert [branch.token_ids for branch in output.outputs] == [ids for ids, _ in expected]
        scores = [branch.score for branch in output.outputs]
        assert scores == pytest.approx([score for _, score in expected], abs=_TOLERANCE)
