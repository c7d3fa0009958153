"""Runs a model on this worker: weights, KV memory and the forward pass of each step.

It executes what `SchedulerOutput` says and decides nothing; it knows no request, only sequences,
and it never samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from preempt_engine.attention.protocol import (
    AttentionBackend,
    AttentionPlan,
    GraphAttention,
    LayerKVCache,
)
from preempt_engine.attention.select import select_backend
from preempt_engine.config import EngineConfig
from preempt_engine.errors import ConfigError, EngineClosedError
from preempt_engine.layers.parallel import SingleRank, TensorParallel
from preempt_engine.layers.row_plan import RowPlan
from preempt_engine.models.config import ModelConfig, resolve_model
from preempt_engine.models.llama import LlamaForCausalLM
from preempt_engine.models.protocol import CausalLM
from preempt_engine.models.registry import load_model
from preempt_engine.models.sharding import ModelShard
from preempt_engine.observer import EngineObserver
from preempt_engine.step import SchedulerOutput
from preempt_engine.worker import decode_graphs
from preempt_engine.worker.decode_graphs import DecodeGraphs
from preempt_engine.worker.determinism import (
    ProbeSetting,
    choose_row_plan,
    install_invariant_kernels,
)
from preempt_engine.worker.graph_sizes import graph_sizes
from preempt_engine.worker.kv_cache import KVCache, choose_num_blocks, choose_num_host_blocks
from preempt_engine.worker.state import WorkerState
from preempt_engine.worker.step_inputs import StepInputs, build_step_inputs
from preempt_engine.worker.swap_space import SwapSpace
from preempt_engine.worker.torch_logits import TorchLogits

_SINGLE_RANK = SingleRank()
# As `CausalLM.forward`.
Forward = Callable[[Tensor, Tensor, Sequence[LayerKVCache], AttentionPlan], Tensor]


class ModelRunner:
    """One worker with a real model.

    Args:
        config: of the engine; `model` is a directory or a hub id.
        observer: told what the attention backend is given; may be set or changed later.
        parallel: the ranks; this one holds a part of the model. `close` leaves them.
        num_hidden_layers: take the first so many layers only, as a draft model; None takes all.

    Attributes:
        model_config: of the checkpoint.
        shard: this rank's part of it.
        rank: tensor parallel rank.
        num_kv_blocks: size of the pool.
        num_host_blocks: size of the swap space.
        vocab_size: columns of the logits.
        max_model_len: most positions of a sequence.
        eos_token_ids: ids that end a generation.
        row_plan: how rows are padded; `RowPlan(1)` without `deterministic`.
        graphs: captured decode steps, on a GPU without `enforce_eager`.

    Raises:
        ModelNotFoundError: the model leads to no usable checkpoint.
        UnsupportedModelError: it asks for mathematics that is not implemented.
        ConfigError: an argument contradicts the model or the device.
        DeterminismError: `deterministic` cannot be honoured here.
    """

    @torch.inference_mode()
    def __init__(
        self,
        config: EngineConfig,
        observer: EngineObserver | None = None,
        parallel: TensorParallel = _SINGLE_RANK,
        num_hidden_layers: int | None = None,
    ) -> None:
        directory = resolve_model(config.model)
        self.config = config
        self.observer = observer
        self.model_config = ModelConfig.from_directory(directory)
        if num_hidden_layers is not None:
            self.model_config = self.model_config.truncated(num_hidden_layers)
        self.parallel = parallel
        self.rank = parallel.rank
        self.shard = ModelShard.of(self.model_config, parallel.rank, parallel.size)
        self.device = choose_device(config.device, parallel.rank, parallel.size)
        self.dtype = choose_dtype(config.dtype, self.model_config, self.device)
        self.max_model_len = choose_max_model_len(config, self.model_config)
        self.vocab_size = self.model_config.vocab_size
        self.eos_token_ids = self.model_config.eos_token_ids
        self._model: CausalLM | None = self._load(
            directory, truncated=num_hidden_layers is not None
        )
        self.row_plan, self._attention = self._choose_attention(self._model)
        self._forward = _choose_forward(self._model, self._attention, self.shard.local, self.dtype)
        self.num_kv_blocks = parallel.minimum(
            choose_num_blocks(config, self.shard.local, self.dtype, self.device)
        )
        reason = decode_graphs.unusable(config, self.device, self._attention, parallel)
        reserved = 0 if reason else decode_graphs.NUM_RESERVED_BLOCKS
        self._kv_cache: KVCache | None = KVCache(
            self.shard.local,
            num_blocks=self.num_kv_blocks + reserved,
            block_size=config.block_size,
            dtype=self.dtype,
            device=self.device,
        )
        self.num_host_blocks = parallel.minimum(
            choose_num_host_blocks(config, self.shard.local, self.dtype, self.device)
        )
        self._swap_space: SwapSpace | None = SwapSpace(self._kv_cache.pool, self.num_host_blocks)
        self.state = WorkerState(config.block_size)
        self.graphs = None if reason else self._capture(self._model, self._kv_cache)

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> TorchLogits:
        """Apply the step's deltas, poison, copies, and compute its tokens.

        Returns:
            `step.num_logits` rows, in the order of `step.scheduled` and of positions; none on
            ranks other than 0.

        Raises:
            EngineClosedError: after `close`.
        """
        if self._model is None or self._kv_cache is None or self._swap_space is None:
            raise EngineClosedError("The model runner is closed.", "Build a new engine.")
        # 1. Memory: what the worker knows, then what lies in the blocks.
        self.state.apply(step)
        self._move_blocks(step, self._kv_cache, self._swap_space)
        if not step.scheduled:
            return TorchLogits(torch.empty(0, self.vocab_size, device=self.device))
        # 2. Tensors.
        inputs = build_step_inputs(step, self.state, self.device, self.row_plan)
        graphs = self.graphs if self.graphs and self.graphs.fits(inputs.metadata) else None
        if graphs is not None:
            graphs.fill(inputs)
        if self.observer is not None:
            handed_over = inputs if graphs is None else graphs.filled(inputs)
            _report_computed(self.observer, self.rank, step, handed_over)
        # 3. Forward; the head runs on the wanted rows only.
        if graphs is not None:
            hidden = graphs.replay(inputs.metadata.num_sequences)  # [size, hidden]
            hidden = hidden[: inputs.input_ids.shape[0]]  # [T', hidden]
        else:
            plan = self._attention.plan(inputs.metadata)
            hidden = self._forward(
                inputs.input_ids, inputs.positions, self._kv_cache.layers, plan
            )  # [T', hidden]
        if not inputs.num_logits:
            return TorchLogits(torch.empty(0, self.vocab_size, device=self.device))
        if inputs.logits_rows is not None:
            hidden = hidden.index_select(0, inputs.logits_rows)  # [R', hidden]
        logits = self._model.compute_logits(hidden)  # [R', vocab]
        return TorchLogits(logits[: inputs.num_logits])

    @torch.inference_mode()
    def reset(self) -> None:
        """Forget every sequence and block: nothing of a trial reaches the next."""
        self.state = WorkerState(self.config.block_size)
        if self._kv_cache is not None:
            self._kv_cache.clear()

    def close(self) -> None:
        """Release weights and KV memory, and leave the ranks. Further calls do nothing."""
        if self._model is not None:
            self.parallel.close()
        self.graphs = None
        self._model = None
        self._forward = _closed
        self._kv_cache = None
        self._swap_space = None
        self.reset()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _load(self, directory: Path, *, truncated: bool) -> CausalLM:
        return load_model(
            directory,
            self.model_config,
            parallel=self.parallel,
            max_model_len=self.max_model_len,
            dtype=self.dtype,
            device=self.device,
            deterministic=self.config.deterministic,
            truncated=truncated,
        )

    def _choose_attention(self, model: CausalLM) -> tuple[RowPlan, AttentionBackend]:
        config, local = self.config, self.shard.local

        def make_attention(row_plan: RowPlan | None) -> AttentionBackend:
            return select_backend(
                config,
                self.device,
                scale=local.head_dim**-0.5,
                row_plan=row_plan,
                group=local.num_attention_heads // local.num_key_value_heads,
                dtype=self.dtype,
                head_dim=local.head_dim,
            )

        if not config.deterministic:
            return RowPlan(1), make_attention(None)

        setting = ProbeSetting(
            model=self.shard.local,
            dtype=self.dtype,
            device=self.device,
            block_size=config.block_size,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
        modules = list(model.modules())
        candidates, matmul = install_invariant_kernels(modules, self.device)
        row_plan = choose_row_plan(
            modules, make_attention, setting, candidates, parallel=self.parallel, matmul=matmul
        )
        return row_plan, make_attention(row_plan)

    def _capture(self, model: CausalLM, kv_cache: KVCache) -> DecodeGraphs:
        config = self.config
        assert isinstance(self._attention, GraphAttention), self._attention
        longest = -(-self.max_model_len // config.block_size)
        return DecodeGraphs(
            model,
            self._attention,
            kv_cache.layers,
            sizes=graph_sizes(config.max_num_seqs, self.row_plan),
            block_size=config.block_size,
            max_blocks=min(longest, self.num_kv_blocks),
            reserved_block=self.num_kv_blocks,
            device=self.device,
            capture=decode_graphs.CudaCapture(self.device),
        )

    def _move_blocks(self, step: SchedulerOutput, kv_cache: KVCache, swap_space: SwapSpace) -> None:
        swap_space.wait()
        if step.swap_out:
            swap_space.swap_out(step.swap_out)
            if self.observer is not None:
                self.observer.worker_swapped_out(step.step_id, self.rank, list(step.swap_out))
        if step.poison_block_ids:
            kv_cache.poison(step.poison_block_ids)
            if self.observer is not None:
                self.observer.blocks_poisoned(step.step_id, self.rank, list(step.poison_block_ids))
        if step.swap_in:
            swap_space.swap_in(step.swap_in)
            if self.observer is not None:
                self.observer.worker_swapped_in(step.step_id, self.rank, list(step.swap_in))
        if step.block_copies:
            kv_cache.copy_blocks(step.block_copies)
            if self.observer is not None:
                self.observer.worker_copied(step.step_id, self.rank, list(step.block_copies))


def _choose_forward(
    model: CausalLM, attention: AttentionBackend, config: ModelConfig, dtype: torch.dtype
) -> Forward:
    """The model's forward pass, or a quicker one with the same weights, ready to run."""
    if attention.name == "numba":
        from preempt_engine.attention.compiled_paged import CompiledAttention
        from preempt_engine.compiled.llama import CompiledLlama

        if isinstance(model, LlamaForCausalLM) and CompiledLlama.serves(model):
            compiled = CompiledLlama(model)
            compiled.compile()
            return compiled.forward
        assert isinstance(attention, CompiledAttention), attention
        attention.compile(
            config.num_attention_heads, config.num_key_value_heads, config.head_dim, dtype
        )
    return model.forward


def _closed(*arguments: object) -> Tensor:
    raise AssertionError("a closed runner computes nothing")


def _report_computed(
    observer: EngineObserver, rank: int, step: SchedulerOutput, inputs: StepInputs
) -> None:
    """Report the tensors of the forward pass, read back; nothing comes from the scheduler."""
    metadata = inputs.metadata
    token_ids = inputs.input_ids.tolist()
    positions = inputs.positions.tolist()
    slots = metadata.slot_mapping.tolist()
    tables = metadata.block_tables.tolist()
    for row, item in enumerate(step.scheduled):
        first, end = metadata.query_start[row], metadata.query_start[row + 1]
        read_len = metadata.read_lens[row]
        observer.computed(
            step.step_id,
            rank,
            item.key,
            positions[first],
            token_ids[first:end],
            slots[first:end],
            tables[row][: -(-read_len // metadata.block_size)],
            read_len,
        )


def choose_device(name: str, rank: int = 0, size: int = 1) -> torch.device:
    """The device that `EngineConfig.device` names; each rank has a GPU of its own.

    Raises:
        ConfigError: the name is no device, there is no such GPU, or too few for all ranks.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(
            f"device={name!r} is unknown.", "Choose auto, cpu, cuda or cuda:N."
        ) from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={name!r} is not supported.", "Choose auto, cpu, cuda or cuda:N.")
    if device.type == "cuda":
        if size > 1 and device.index is not None:
            raise ConfigError(
                f"device={name!r} is one GPU, and there are {size} ranks.",
                "Use device='cuda', and CUDA_VISIBLE_DEVICES to choose among GPUs.",
            )
        index = device.index or rank
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if index >= count:
            raise ConfigError(
                f"device={name!r} for rank {rank}: this machine has {count} CUDA devices that "
                "torch can use.",
                "Choose device='cpu', install torch for CUDA, or use fewer ranks.",
            )
        return torch.device("cuda", index)
    return torch.device("cpu")


def choose_dtype(name: str, model: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype that `EngineConfig.dtype` names.

    "auto" is the checkpoint's on a GPU and float32 on a CPU, where 16-bit products are usually
    emulated and slower. float16 is refused on a CPU: the models were trained in bfloat16 or
    float32, nothing there is faster in float16, and activations may overflow it.

    Raises:
        ConfigError: float16 on a CPU.
    """
    if name == "auto":
        name = "float32" if device.type == "cpu" else model.dtype
    if name == "float16" and device.type == "cpu":
        raise ConfigError(
            "dtype='float16' is not supported on a CPU.", "Use dtype='float32' or 'bfloat16'."
        )
    return {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    }[name]


def choose_max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """Most positions of a sequence.

    Raises:
        ConfigError: more than the model was made for.
    """
    limit = model.max_position_embeddings
    if config.max_model_len is None:
        return limit
    if config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len={config.max_model_len} exceeds the model's {limit} positions.",
            f"Use max_model_len={limit} or less.",
        )
    return config.max_model_len
