"""Adapter "transformers-cb": transformers' continuous batching, whole.

What it can, and what it refuses; a run of it is in `transformers_cb_session`.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from importlib.util import find_spec

import msgspec

from preempt_harness.adapters import protocol
from preempt_harness.adapters.protocol import EngineSettings, KnownIssue
from preempt_harness.adapters.transformers_cb_model import load_tokenizer, model_path
from preempt_harness.adapters.transformers_cb_session import TransformersSession
from preempt_harness.admission import AdmissionModel
from preempt_harness.workload import SamplingSpec

_INSTALL = 'pip install "preempt-harness[engine]" "transformers>=5.24"'
_PAGE = "docs/adapters/transformers-cb.md"
_LEAST_BLOCK_SIZE = 4


class TransformersAdapter:
    """Adapter "transformers-cb"."""

    name = "transformers-cb"
    capabilities = frozenset(
        {
            protocol.STEPPED,
            protocol.PREEMPT,
            protocol.ABORT,
            protocol.SCORE,
            protocol.RECOMPUTE,
            protocol.SWAP,
            protocol.PREFIX_CACHING,
            protocol.CHUNKED_PREFILL,
            protocol.MIXED_STEPS,
            protocol.LOGPROBS,
            protocol.PARALLEL_SAMPLING,
            protocol.STOP_TOKENS,
        }
    )
    models: tuple[str, ...] = (
        "tiny-llama",
        "tiny-qwen2",
        "tiny-qwen3",
        "tiny-mistral",
        "smollm2",
    )
    block_sizes: tuple[int, ...] = (4, 8, 16, 32)
    isolation = "process"
    known_issues = tuple(
        KnownIssue(code=code, scenario=scenario, versions="5.24", link=f"{_PAGE}#{section}")
        for code, scenario, section in (
            ("CRASH-HANG", "test_survivors_cancelled_after_a_preemption[recompute]", "hang"),
            ("CRASH-HANG", "test_survivors_cancelled_after_a_preemption[swap]", "hang"),
            ("CRASH-HANG", "test_survivors_cancelled_in_a_full_pool", "hang"),
            ("CRASH-EXCEPTION", "test_a_request_too_large_is_refused_alone", "too-large"),
            ("CRASH-EXCEPTION", "test_a_prompt_larger_than_the_pool_ends_alone", "too-large"),
            (
                "CRASH-EXCEPTION",
                "test_a_prompt_larger_than_the_pool_is_answered_by_an_idle_engine",
                "too-large",
            ),
            ("CRASH-EXCEPTION", "test_preemption_infeasible", "too-large"),
            ("CRASH-EXCEPTION", "test_mixture[11]", "too-large"),
            ("CRASH-EXCEPTION", "test_a_used_swap_space_too_small_for_the_next", "swap-space"),
            ("CRASH-EXCEPTION", "test_several_outputs_with_one_token_to_compute[*", "one-token"),
        )
    )

    def admission_model(self, settings: EngineSettings) -> AdmissionModel:
        """A request is admitted when its first chunk fits; later ones may starve.

        `max_num_seqs` limits a batch and not how many requests hold blocks.
        """
        return AdmissionModel(
            policy="chunk",
            block_size=settings.block_size,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            outputs_apart=True,
            prefix_caching=settings.enable_prefix_caching,
            merges_equal_blocks=True,
        )

    def vocab_size(self, settings: EngineSettings) -> int:
        """From the model's configuration file."""
        config = json.loads((model_path(settings.model) / "config.json").read_text())
        return int(config["vocab_size"])

    def encode(self, settings: EngineSettings, text: str) -> list[int] | None:
        """Ids by the model's tokenizer; None for models with random weights."""
        if settings.model.startswith("tiny-"):
            return None
        ids: list[int] = load_tokenizer(settings.model)(text)["input_ids"]
        return ids

    def branch_sampling(self, sampling: SamplingSpec, branch: int) -> SamplingSpec | None:
        """All outputs are greedy, and so what one alone would be."""
        return msgspec.structs.replace(sampling, n=1)

    def missing(self) -> str | None:
        """transformers 5.24 or later, and torch."""
        if find_spec("torch") is None or find_spec("transformers") is None:
            return _INSTALL
        major, minor = version("transformers").split(".")[:2]
        return None if (int(major), int(minor)) >= (5, 24) else _INSTALL

    def refusal(self, settings: EngineSettings) -> str | None:
        """Settings that the engine has not."""
        if settings.block_size < _LEAST_BLOCK_SIZE:
            return f"block_size={settings.block_size}: it has {_LEAST_BLOCK_SIZE} and more"
        if settings.max_model_len is not None:
            return "max_model_len: it has no such setting"
        if settings.tensor_parallel_size > 1:
            return "tensor_parallel_size: it is run on one device"
        return None

    def open(self, settings: EngineSettings) -> TransformersSession:
        """A new manager on a model that is kept.

        Raises:
            UnsupportedTrialError: the model has layers of which no tables can be read.
        """
        return TransformersSession(settings)
