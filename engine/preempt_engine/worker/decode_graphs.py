"""Decode steps captured once for each number of rows, and replayed.

A step in which every sequence computes one token launches the same kernels whatever the tokens
are. It is captured with all its inputs in fixed memory; a step then fills that memory and replays
the smallest capture that its sequences fit into. Rows too many are padding: they read and write
the first slot of a block of their own, which the scheduler knows nothing of, so that they touch
nobody's keys. Nothing of a sequence stays here between steps: what a preemption changes is in the
next step's tables as it is without captures.

On a GPU a capture is a CUDA graph, and all share one memory pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from preempt_engine.attention.protocol import (
    AttentionBackend,
    AttentionMetadata,
    AttentionPlan,
    DecodeBuffers,
    GraphAttention,
    LayerKVCache,
)
from preempt_engine.attention.transfer import to_device
from preempt_engine.config import EngineConfig
from preempt_engine.layers.parallel import TensorParallel
from preempt_engine.models.protocol import CausalLM
from preempt_engine.worker.graph_sizes import size_for
from preempt_engine.worker.step_inputs import StepInputs

# Runs what was captured, and returns the memory that its result lies in.
Replay = Callable[[], Tensor]
# (what to run) -> how to run it again
Capture = Callable[[Callable[[], Tensor]], Replay]

# Blocks behind the pool's own: the padding rows'.
NUM_RESERVED_BLOCKS = 1


def unusable(
    config: EngineConfig,
    device: torch.device,
    backend: AttentionBackend,
    parallel: TensorParallel,
) -> str:
    """Why decode steps are not captured; "" when they are."""
    if config.enforce_eager:
        return "enforce_eager=True"
    if device.type != "cuda":
        return "CUDA graphs need a CUDA device"
    if not isinstance(backend, GraphAttention):
        return f"attention_backend={backend.name!r} reads its work from the host"
    if parallel.size > 1:
        return "collectives of several ranks are not captured"
    return ""


class DecodeGraphs:
    """The captures of one worker.

    Args:
        model: runs the step.
        backend: plans its attention.
        kv_caches: of every layer, with a block more than the scheduler knows.
        sizes: numbers of rows to capture, rising.
        block_size: tokens per block.
        max_blocks: blocks of the longest sequence.
        reserved_block: id of the padding rows' block.
        device: of everything.
        capture: how a size is captured; `CudaCapture` on a GPU.
    """

    def __init__(
        self,
        model: CausalLM,
        backend: GraphAttention,
        kv_caches: Sequence[LayerKVCache],
        *,
        sizes: Sequence[int],
        block_size: int,
        max_blocks: int,
        reserved_block: int,
        device: torch.device,
        capture: Capture,
    ) -> None:
        self.sizes = tuple(sizes)
        most = self.sizes[-1]
        self._block_size = block_size
        self._reserved_block = reserved_block
        self._device = device
        self._input_ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device)
        self._slots = torch.zeros(most, dtype=torch.int64, device=device)
        self._tables = torch.zeros(most, max_blocks, dtype=torch.int32, device=device)
        self._read_lens = torch.ones(most, dtype=torch.int32, device=device)
        self._pad(0, most)
        self._replays: dict[int, Replay] = {}
        for size in reversed(self.sizes):  # the largest first: the others reuse its memory
            plan = backend.plan_decode(self._buffers(size))
            self._replays[size] = capture(self._step(model, kv_caches, plan, size))

    def fits(self, metadata: AttentionMetadata) -> bool:
        """True for a step that computes one token of each sequence."""
        return metadata.num_tokens == metadata.num_sequences <= self.sizes[-1]

    def fill(self, inputs: StepInputs) -> None:
        """Take over a step's inputs; the rows behind them become padding. Nobody is waited for."""
        metadata = inputs.metadata
        count = metadata.num_sequences
        width = metadata.block_tables.shape[1]
        self._input_ids[:count].copy_(inputs.input_ids[:count])
        self._positions[:count].copy_(inputs.positions[:count])
        self._slots[:count].copy_(metadata.slot_mapping)
        self._tables[:count, :width].copy_(metadata.block_tables)
        read_lens = np.array(metadata.read_lens, dtype=np.int32)
        self._read_lens[:count].copy_(to_device(read_lens, self._device))
        self._pad(count, size_for(count, self.sizes))

    def filled(self, inputs: StepInputs) -> StepInputs:
        """What the kernels will read for the step that `fill` was given, for observers.

        Waits for the device.
        """
        count = inputs.metadata.num_sequences
        return StepInputs(
            input_ids=self._input_ids[:count],
            positions=self._positions[:count],
            metadata=AttentionMetadata(
                query_start=list(range(count + 1)),
                read_lens=self._read_lens[:count].tolist(),
                slot_mapping=self._slots[:count],
                block_tables=self._tables[:count],
                block_size=self._block_size,
            ),
            logits_rows=inputs.logits_rows,
            num_logits=inputs.num_logits,
        )

    def replay(self, num_sequences: int) -> Tensor:
        """Run the filled step.

        Returns:
            [size, hidden], of which the first `num_sequences` rows count; overwritten by the
            next replay of any size.
        """
        return self._replays[size_for(num_sequences, self.sizes)]()

    def _buffers(self, size: int) -> DecodeBuffers:
        return DecodeBuffers(
            slot_mapping=self._slots[:size],
            block_tables=self._tables[:size],
            read_lens=self._read_lens[:size],
            block_size=self._block_size,
        )

    def _pad(self, first: int, last: int) -> None:
        """Rows [first, last) read and write position 0 of the reserved block."""
        self._input_ids[first:last] = 0
        self._positions[first:last] = 0
        self._slots[first:last] = self._reserved_block * self._block_size
        self._tables[first:last, 0] = self._reserved_block
        self._read_lens[first:last] = 1

    def _step(
        self,
        model: CausalLM,
        kv_caches: Sequence[LayerKVCache],
        plan: AttentionPlan,
        size: int,
    ) -> Callable[[], Tensor]:
        def run() -> Tensor:
            return model.forward(self._input_ids[:size], self._positions[:size], kv_caches, plan)

        return run


class CudaCapture:
    """Captures CUDA graphs that share one memory pool.

    Args:
        device: whose stream is captured.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor]) -> Replay:
        with torch.cuda.device(self._device):
            # Once beforehand, on another stream: kernels are compiled and libraries set up when
            # they are first used, which cannot be captured.
            stream: torch.cuda.Stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(stream):
                run()
            torch.cuda.current_stream(self._device).wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                output = run()

        def replay() -> Tensor:
            with torch.cuda.device(self._device):
                graph.replay()
            return output

        return replay
