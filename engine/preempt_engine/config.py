"""The engine's configuration: frozen, validated in one place; messages say what to change.

Knows neither torch nor the model's own configuration; `dtype` and `device` are names here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from preempt_engine.errors import ConfigError
from preempt_engine.spec_decode.config import SpeculativeConfig

BlockReuseOrder = Literal["fifo", "lifo", "random"]
SchedulingPolicy = Literal["fcfs", "priority"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
PreemptionMode = Literal["recompute", "swap"]

EXACT_MODEL = "exact"
DEFAULT_CPU_KV_BYTES = 256 * 2**20
DEFAULT_SWAP_SPACE_BYTES = 4 * 2**30  # vLLM's default of `swap_space`
DEFAULT_CPU_SWAP_SPACE_BYTES = DEFAULT_CPU_KV_BYTES
DEFAULT_EXACT_BLOCKS = 4096


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How one engine runs. Every field is a keyword argument of `LLM`.

    Attributes:
        model: "exact", a directory in Hugging Face format, or a hub id.
        tokenizer: directory or hub id of the tokenizer; None takes the model's.
        dtype: of weights and KV cache; "auto" takes the checkpoint's (float32 on a CPU).
        device: "auto" (CUDA if present), "cpu", "cuda", "cuda:N".
        max_model_len: most tokens, prompt and output together, of one sequence; None takes the
            model's own limit.
        max_num_seqs: most sequences that run at once. A request counts with all its branches (n,
            or the beam width) from its admission on, less those that have ended.
        max_num_batched_tokens: token budget of one step.
        scheduling_policy: "fcfs" serves in order of arrival; "priority" the lower priority value
            first, equals in order of arrival, and lets a more urgent request take the blocks of
            less urgent ones.
        max_waiting_requests: most requests in the waiting queue; one that arrives when it is full
            is refused. A preempted request always returns to it. None sets no limit.
        block_size: tokens per KV block, at least 1.
        num_kv_blocks: size of the pool in blocks; None derives it from the memory settings.
        kv_cache_memory_bytes: memory for the pool; the default on a CPU is 256 MiB.
        gpu_memory_utilization: share of the GPU's memory that the engine may fill, in (0, 1].
        watermark: share of the pool that admission leaves free, in [0, 1).
        preemption_mode: "recompute" drops the victim's blocks and computes them again; "swap"
            copies them to host memory and back. Without room there, it recomputes.
        swap_space_blocks: host memory for swapping, in blocks; 0 is allowed.
        swap_space_bytes: the same in bytes, for each rank. With neither, preemption_mode="swap"
            takes 4 GiB (256 MiB on a CPU), and "recompute" none.
        enable_prefix_caching: keep full blocks findable by content.
        speculative_config: how tokens are drafted ahead, see `SpeculativeConfig`, of which a
            dictionary names fields; None drafts nothing.
        async_scheduling: steps that are decided ahead of the one that runs, 0 to 2. Not together
            with a draft model or priorities.
        enforce_eager: never capture decode steps as CUDA graphs. They are captured on a GPU only,
            with one rank, by the backends "triton" and "flash-attn".
        tensor_parallel_size: number of ranks.
        seed: of everything random in the engine.
        deterministic: logits are bitwise equal under any batch mix, chunking and preemption.
        attention_backend: "numba", "torch", "triton", "flash-attn", or "auto": on a CPU numba where
            it is installed, else torch; on a GPU flash-attn where it is installed and fits
            (block_size a multiple of 256, 16-bit dtype, not deterministic), else triton, else
            torch.
        poison: fill freed blocks with a large finite pattern.
        block_reuse_order: which free block is handed out first.
        exact_vocab_size: vocabulary of the exact model, 32 to 256.
        skip_tokenizer_init: token ids only; no text.
        worker_processes: with several ranks, each lives in a process of its own. False keeps those
            of the exact model in this process: they start at once and are sent the same messages.
        worker_timeout_s: longest a rank may take over one step; then the step fails.
        worker_start_timeout_s: longest a rank may take to start and load its shard.
        debug_worker_state: every step carries a checksum of what each rank must know.
        worker_hooks: "module:function" or "module:function:argument", called in every rank with
            its runner, and the argument, before the first step.
    """

    model: str
    tokenizer: str | None = None
    dtype: Dtype = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    scheduling_policy: SchedulingPolicy = "fcfs"
    max_waiting_requests: int | None = None
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    watermark: float = 0.0
    preemption_mode: PreemptionMode = "recompute"
    swap_space_blocks: int | None = None
    swap_space_bytes: int | None = None
    enable_prefix_caching: bool = True
    speculative_config: SpeculativeConfig | None = None
    async_scheduling: int = 0
    enforce_eager: bool = False
    tensor_parallel_size: int = 1
    seed: int = 0
    deterministic: bool = False
    attention_backend: str = "auto"
    poison: bool = False
    block_reuse_order: BlockReuseOrder = "fifo"
    exact_vocab_size: int = 64
    skip_tokenizer_init: bool = False
    worker_processes: bool = True
    worker_timeout_s: float = 60.0
    worker_start_timeout_s: float = 300.0
    debug_worker_state: bool = False
    worker_hooks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in _POSITIVE_INTEGERS:
            _check_positive_integer(name, getattr(self, name))
        _check_range("gpu_memory_utilization", self.gpu_memory_utilization, 0.0, 1.0)
        if not 0.0 <= self.watermark < 1.0:
            raise ConfigError(
                f"watermark={self.watermark} is not in [0, 1).",
                "It is the share of the pool that admission leaves free; 0.01 is usual.",
            )
        _check_choice("scheduling_policy", self.scheduling_policy, get_args(SchedulingPolicy))
        _check_choice("dtype", self.dtype, get_args(Dtype))
        _check_choice("preemption_mode", self.preemption_mode, get_args(PreemptionMode))
        _check_swap_space(self.swap_space_blocks, self.swap_space_bytes)
        if not isinstance(self.speculative_config, SpeculativeConfig | None):
            raise ConfigError(
                f"speculative_config={self.speculative_config!r} is no configuration.",
                'Give {"method": "ngram", "num_speculative_tokens": 3}, for instance.',
            )
        _check_async_scheduling(self)
        _check_choice("block_reuse_order", self.block_reuse_order, get_args(BlockReuseOrder))
        if not 32 <= self.exact_vocab_size <= 256:
            raise ConfigError(
                f"exact_vocab_size={self.exact_vocab_size} is not in [32, 256].",
                "Choose a vocabulary in that range.",
            )
        if self.num_kv_blocks is not None and self.kv_cache_memory_bytes is not None:
            raise ConfigError(
                "num_kv_blocks and kv_cache_memory_bytes are both given; each sizes the pool.",
                "Give one of them.",
            )
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigError(f"seed={self.seed!r} is not an integer.", "Give an integer.")
        for name in ("worker_timeout_s", "worker_start_timeout_s"):
            _check_seconds(name, getattr(self, name))
        if not self.worker_processes and not self.is_exact:
            raise ConfigError(
                f"worker_processes=False with model={self.model!r}: ranks of a real model need "
                "processes of their own.",
                'Leave it out, or take model="exact".',
            )
        _check_worker_hooks(self.worker_hooks)

    @property
    def num_speculative_tokens(self) -> int:
        """Most drafts of a sequence in one step; 0 without speculation."""
        speculative = self.speculative_config
        return 0 if speculative is None else speculative.num_speculative_tokens

    @property
    def is_exact(self) -> bool:
        """True when the model is the exact KV model rather than a checkpoint."""
        return self.model == EXACT_MODEL

    def num_host_blocks(self, block_bytes: int, default_bytes: int) -> int:
        """Size of the swap space in blocks.

        Args:
            block_bytes: size of one block.
            default_bytes: what `preemption_mode="swap"` takes when no size is given.
        """
        if self.swap_space_blocks is not None:
            return self.swap_space_blocks
        if self.swap_space_bytes is not None:
            return self.swap_space_bytes // block_bytes
        return default_bytes // block_bytes if self.preemption_mode == "swap" else 0

    @classmethod
    def from_kwargs(cls, model: str, kwargs: dict[str, Any]) -> EngineConfig:
        """Build from `LLM`'s keyword arguments.

        Raises:
            ConfigError: an argument is unknown (the closest known one is named) or wrong.
        """
        known = {field.name for field in dataclasses.fields(cls)} - {"model"}
        for name in kwargs:
            if name not in known:
                raise ConfigError(f"LLM has no argument {name!r}.", _suggest(name, known))
        hooks = kwargs.get("worker_hooks")
        if isinstance(hooks, list):  # as plain data from a file has it
            kwargs = kwargs | {"worker_hooks": tuple(hooks)}
        speculative = kwargs.get("speculative_config")
        if isinstance(speculative, Mapping):
            made = SpeculativeConfig.from_mapping(speculative)
            kwargs = kwargs | {"speculative_config": made}
        return cls(model=model, **kwargs)


_POSITIVE_INTEGERS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_waiting_requests",
    "block_size",
    "num_kv_blocks",
    "kv_cache_memory_bytes",
    "tensor_parallel_size",
)


_MAY_BE_NONE = (
    "max_model_len",
    "max_waiting_requests",
    "num_kv_blocks",
    "kv_cache_memory_bytes",
)


def _check_positive_integer(name: str, value: object) -> None:
    if value is None and name in _MAY_BE_NONE:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={value!r} is not a positive integer.", "Give 1 or more.")


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low < value <= high:
        raise ConfigError(
            f"{name}={value} is not in ({low}, {high}].", "Give a share, such as 0.9."
        )


def _check_swap_space(blocks: int | None, num_bytes: int | None) -> None:
    for name, value in (("swap_space_blocks", blocks), ("swap_space_bytes", num_bytes)):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"{name}={value!r} is not a size.", "Give an integer, 0 or more.")
    if blocks is not None and num_bytes is not None:
        raise ConfigError(
            "swap_space_blocks and swap_space_bytes are both given; each sizes the swap space.",
            "Give one of them.",
        )


def _check_seconds(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{name}={value!r} is not a time.", "Give seconds, more than 0.")


def _check_async_scheduling(config: EngineConfig) -> None:
    depth = config.async_scheduling
    if isinstance(depth, bool) or not isinstance(depth, int) or not 0 <= depth <= 2:
        raise ConfigError(f"async_scheduling={depth!r} is no depth.", "Give 0, 1 or 2.")
    speculative = config.speculative_config
    if depth and speculative is not None and speculative.method == "draft_model":
        raise ConfigError(
            f"async_scheduling={depth} with a draft model: it would have to wait for each step, "
            "and the next is decided by then.",
            'Leave one of them out, or draft with method="ngram".',
        )
    if depth and config.scheduling_policy == "priority":
        raise ConfigError(
            f'async_scheduling={depth} with scheduling_policy="priority": blocks of a victim are '
            "not free while a step is under way.",
            'Leave one of them out; scheduling_policy="fcfs" goes with both.',
        )


def _check_worker_hooks(hooks: object) -> None:
    if isinstance(hooks, tuple) and all(isinstance(hook, str) and ":" in hook for hook in hooks):
        return
    raise ConfigError(
        f"worker_hooks={hooks!r} is not a tuple of import strings.",
        'Give a tuple such as ("package.module:function",).',
    )


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name}={value!r} is unknown.", f"Choose one of {', '.join(choices)}.")


def _suggest(name: str, known: set[str]) -> str:
    import difflib

    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(sorted(known))}."
