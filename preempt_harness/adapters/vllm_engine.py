"""vLLM itself: what is used of it, imported late, and its objects made from a trial's settings.

The only module that imports vLLM. Constructor signatures differ between versions; those that lack
what is needed are refused by name.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from preempt_harness.adapters.exact_workers import END_TOKEN_ID, VOCAB_SIZE
from preempt_harness.adapters.protocol import EngineSettings
from preempt_harness.errors import HarnessError
from preempt_harness.workload import RequestSpec

TESTED = ("0.33.0",)


class VllmVersionError(HarnessError):
    """The installed vLLM is not one whose scheduler this adapter can drive."""


class Names:
    """What is used of vLLM; imported together, once, because it takes seconds."""

    def __init__(self) -> None:
        import torch
        from vllm import SamplingParams, config
        from vllm.utils.hashing import sha256
        from vllm.v1 import kv_cache_interface, outputs, request
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.core.sched.interface import PauseState
        from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
        from vllm.v1.structured_output import StructuredOutputManager

        lacking = [
            f"{owner.__name__}.{name}"
            for owner, name in (
                (NewRequestData, "prefill_token_ids"),
                (SchedulerOutput, "preempted_req_ids"),
            )
            if name not in owner.__dataclass_fields__
        ]
        if lacking:
            raise VllmVersionError(
                f"vLLM {version('vllm')} has no {', '.join(lacking)}.",
                f"This adapter drives schedulers of model runner V2; tested: {', '.join(TESTED)}.",
            )
        self.torch: Any = torch
        self.config: Any = config
        self.sha256: Any = sha256
        self.kv_cache_interface: Any = kv_cache_interface
        self.kv_cache_utils: Any = kv_cache_utils
        self.SamplingParams: Any = SamplingParams
        self.PauseState: Any = PauseState
        self.ModelRunnerOutput: Any = outputs.ModelRunnerOutput
        self.DraftTokenIds: Any = outputs.DraftTokenIds
        self.Request: Any = request.Request
        self.RequestStatus: Any = request.RequestStatus
        self.StructuredOutputManager: Any = StructuredOutputManager
        kv_cache_utils.init_none_hash(sha256)


@lru_cache(maxsize=1)
def vllm() -> Names:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what libraries deprecate is not the user's to mend
        return Names()


@lru_cache(maxsize=1)
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Lives as long as the process."""
    folder = tempfile.TemporaryDirectory(prefix="preempt-harness-vllm-")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 1 << 20,
        "bos_token_id": 1,
        "eos_token_id": END_TOKEN_ID,
    }
    (Path(folder.name) / "config.json").write_text(json.dumps(config))
    return folder


def model_folder() -> str:
    """A configuration of the smallest Llama; the scheduler reads lengths of it, nothing else."""
    return _folder().name


def make_config(settings: EngineSettings, max_model_len: int) -> Any:
    """The engine's own configuration objects."""
    config = vllm().config
    model = config.ModelConfig(
        model=model_folder(),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=max_model_len,
        seed=settings.seed,
    )
    cache = config.CacheConfig(
        block_size=settings.block_size, enable_prefix_caching=settings.enable_prefix_caching
    )
    cache.num_gpu_blocks = settings.num_blocks
    scheduler = config.SchedulerConfig(
        max_num_seqs=min(settings.max_num_seqs, settings.max_num_batched_tokens),
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=max_model_len,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
        policy=settings.scheduling_policy,
        watermark=settings.watermark,
        async_scheduling=settings.async_scheduling > 0,
    )
    parallel = config.ParallelConfig()
    speculative = None
    if settings.speculative_config is not None:
        # Who drafts is the worker's business; of the methods without a model this is the plain one.
        speculative = config.SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=settings.speculative_config["num_speculative_tokens"],
            prompt_lookup_min=1,
            prompt_lookup_max=3,
            target_model_config=model,
            target_parallel_config=parallel,
        )
    return config.VllmConfig(
        model_config=model,
        cache_config=cache,
        scheduler_config=scheduler,
        parallel_config=parallel,
        speculative_config=speculative,
        device_config=config.DeviceConfig("cpu"),
    )


def make_scheduler(config: Any, settings: EngineSettings) -> Any:
    """The scheduler class that the configuration asks for, over a pool of so many blocks."""
    names = vllm()
    interface = names.kv_cache_interface
    spec = interface.FullAttentionSpec(
        block_size=settings.block_size, num_kv_heads=1, head_size=1, dtype=names.torch.float32
    )
    scheduler = config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=interface.KVCacheConfig(
            num_blocks=settings.num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[interface.KVCacheGroupSpec(["layer"], spec)],
        ),
        structured_output_manager=names.StructuredOutputManager(config),
        block_size=settings.block_size,
        log_stats=True,
    )
    if not scheduler.use_v2_model_runner:
        raise VllmVersionError(
            "vLLM chose its model runner V1, which this adapter does not stand in for.",
            "Unset VLLM_USE_V2_MODEL_RUNNER, or set it to 1.",
        )
    return scheduler


def block_hasher(block_size: int) -> Any:
    return vllm().kv_cache_utils.get_request_block_hasher(block_size, vllm().sha256)


def make_request(spec: RequestSpec, arrival: int, hasher: Any) -> Any:
    """The engine's request, as its front end makes it."""
    params = vllm().SamplingParams(
        temperature=0.0,
        max_tokens=spec.sampling.max_tokens,
        ignore_eos=spec.sampling.ignore_eos,
        stop_token_ids=list(spec.sampling.stop_token_ids),
    )
    params.update_from_generation_config({}, END_TOKEN_ID)
    return vllm().Request(
        request_id=spec.id,
        prompt_token_ids=list(spec.prompt_token_ids),
        sampling_params=params,
        pooling_params=None,
        arrival_time=float(arrival),
        priority=spec.priority,
        block_hasher=hasher,
    )
