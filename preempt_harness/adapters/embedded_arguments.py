"""A trial's settings and sampling parameters in the embedded engine's own terms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, cast

from preempt_harness.adapters.protocol import EngineSettings
from preempt_harness.errors import HarnessError
from preempt_harness.processors import PROCESSORS
from preempt_harness.workload import BeamSpec, SamplingSpec

if TYPE_CHECKING:
    from preempt_engine import BeamSearchParams, SamplingParams


class UnsupportedSamplingError(HarnessError):
    """Sampling parameters that the engine does not combine."""


_SAMPLING_FIELDS = (
    "n",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "min_tokens",
    "ignore_eos",
    "stop",
    "stop_token_ids",
    "logprobs",
    "prompt_logprobs",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "bad_words",
)


_BEAM_FIELDS = frozenset({"beam", "max_tokens", "ignore_eos", "stop_token_ids"})


def engine_params(spec: SamplingSpec) -> SamplingParams | BeamSearchParams:
    """How the engine samples a request.

    Raises:
        UnsupportedSamplingError: it does not combine what is asked for.
    """
    return _sampling_params(spec) if spec.beam is None else _beam_params(spec, spec.beam)


def _sampling_params(spec: SamplingSpec) -> SamplingParams:
    from preempt_engine import SamplingParams, StructuredOutputsParams

    structured_outputs = None
    if spec.json_schema is not None or spec.regex is not None:
        structured_outputs = StructuredOutputsParams(json=spec.json_schema, regex=spec.regex)
    return SamplingParams(
        **{name: getattr(spec, name) for name in _SAMPLING_FIELDS},
        logits_processors=tuple(PROCESSORS[name]() for name in spec.logits_processors),
        structured_outputs=structured_outputs,
    )


def _beam_params(spec: SamplingSpec, beam: BeamSpec) -> BeamSearchParams:
    from preempt_engine import BeamSearchParams

    plain = SamplingSpec()
    unknown = [
        name
        for name in spec.__struct_fields__
        if name not in _BEAM_FIELDS and getattr(spec, name) != getattr(plain, name)
    ]
    if unknown:
        raise UnsupportedSamplingError(
            f"The embedded engine's beam search knows no {', '.join(unknown)}.",
            "Leave them out, or sample with n instead of beam.",
        )
    return BeamSearchParams(
        beam_width=beam.num_beams,
        max_tokens=spec.max_tokens,
        length_penalty=beam.length_penalty,
        early_stopping=cast("bool | Literal['never']", beam.early_stopping),
        ignore_eos=spec.ignore_eos,
        stop_token_ids=spec.stop_token_ids,
    )


def llm_arguments(settings: EngineSettings, options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `LLM`; `options` are more of them."""
    from preempt_harness.checkpoints import resolve_model_name

    return {
        "model": str(resolve_model_name(settings.model)),
        "num_kv_blocks": settings.num_blocks,
        "block_size": settings.block_size,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "max_num_seqs": settings.max_num_seqs,
        "max_model_len": settings.max_model_len,
        "scheduling_policy": settings.scheduling_policy,
        "max_waiting_requests": settings.max_waiting_requests,
        "watermark": settings.watermark,
        "enable_prefix_caching": settings.enable_prefix_caching,
        "speculative_config": _speculative_config(settings),
        "async_scheduling": settings.async_scheduling,
        "seed": settings.seed,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "deterministic": settings.deterministic,
        "dtype": settings.dtype,
        **_swap_space(settings, options),
        **options,
    }


def _speculative_config(settings: EngineSettings) -> dict[str, Any] | None:
    """With a draft model's name as `LLM` knows it."""
    from preempt_harness.checkpoints import resolve_model_name

    given = settings.speculative_config
    if given is None or given.get("model") is None:
        return given
    return {**given, "model": str(resolve_model_name(given["model"]))}


def _swap_space(settings: EngineSettings, options: Mapping[str, Any]) -> dict[str, int]:
    """Room for every block, so that a plan can swap; unless the trial sizes it itself."""
    sized = "swap_space_blocks" in options or "swap_space_bytes" in options
    return {} if sized else {"swap_space_blocks": settings.num_blocks}
