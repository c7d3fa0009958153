"""The worker's view of transformers' continuous batching: what the model's forward call is given.

Tokens, positions and cache indices are read from the keyword arguments that the attention layers
write and read by, and never derived from what the scheduler decided.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from preempt_harness import record
from preempt_harness.adapters.listening import common_length
from preempt_harness.adapters.transformers_cb_names import request_name, sequence_name

if TYPE_CHECKING:
    from torch import nn

    from preempt_harness.adapters.transformers_cb_log import BatchLog


class UnreadableIndexError(RuntimeError):
    """The forward call's cache indices are not those of a block table."""


class ForwardView:
    """Emits rows of each forward pass.

    Args:
        log: takes the events, and knows the step.
        processor: transformers' `ContinuousBatchProcessor`.
        model: whose forward calls it makes.
        first_block: the engine's id of the first block that a request can get.

    Attributes:
        best: the engine's name of a sequence -> per output token, the likeliest tokens, where more
            than the chosen one's log probability was asked for.
    """

    def __init__(self, log: BatchLog, processor: Any, model: nn.Module, first_block: int) -> None:
        self.best: dict[str, list[dict[int, float]]] = {}
        self._log = log
        self._processor = processor
        self._first_block = first_block
        (self._allocator,) = processor.cache.cache_allocators.values()
        self._page: int = self._allocator.tokens_per_page
        self._tables: dict[str, list[int]] = {}
        self._hooks = [
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            model.register_forward_hook(self._after_forward, with_kwargs=True),
        ]

    def detach(self) -> None:
        """Leave the model alone; it is used by the next session."""
        for hook in self._hooks:
            hook.remove()

    def _before_forward(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get("cache") is not self._processor.cache:
            return  # a plain forward pass, to score
        self._log.emit(record.StepLaunched(step=self._log.step))
        (layer_type,) = kwargs["cu_seq_lens_k"]
        ends = kwargs["cu_seq_lens_q"].tolist()
        read_ends = kwargs["cu_seq_lens_k"][layer_type].tolist()
        token_ids = kwargs["input_ids"][0].tolist()
        positions = kwargs["position_ids"][0].tolist()
        written = kwargs["write_index"][0].tolist()
        read = kwargs["read_index"][0].tolist()
        batch = self._processor.inputs_and_outputs.requests_in_batch
        for index, future in enumerate(batch):
            row = slice(ends[index], ends[index + 1])
            slots = [self._slot(place) for place in written[row]]
            # With nothing in the cache to read, attention sees the tokens of this step alone.
            span = slice(read_ends[index], read_ends[index + 1])
            seen = [self._slot(place) for place in read[span]] if read else slots
            self._emit_row(future.state.request_id, positions[row], token_ids[row], slots, seen)
        self._log.hand_over()

    def _after_forward(
        self, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any
    ) -> None:
        if kwargs.get("cache") is not self._processor.cache:
            return
        self._log.emit(record.StepDone(step=self._log.step))
        logits = output.logits[0]
        if "logits_to_keep" not in kwargs:
            logits = logits[kwargs["logits_indices"]]
        batch = self._processor.inputs_and_outputs.requests_in_batch
        chosen = [future.state.request_id for future in batch if future.has_new_token]
        for engine_id, row in zip(chosen, logits, strict=False):
            spec = self._log.requests[request_name(engine_id)]
            if (spec.sampling.logprobs or 0) > 1:
                top = row.float().log_softmax(-1).topk(spec.sampling.logprobs)
                entry = dict(zip(top.indices.tolist(), top.values.tolist(), strict=True))
                self.best.setdefault(engine_id, []).append(entry)

    def _slot(self, place: int) -> int:
        """A row of the cache tensor as block * block size + offset."""
        stride: int = self._allocator.block_physical_stride
        block, offset = divmod(place, stride)
        if offset >= self._page:
            raise UnreadableIndexError(f"cache index {place} is no key of a layer's first page")
        return (block - self._first_block) * self._page + offset

    def _emit_row(
        self,
        engine_id: str,
        positions: list[int],
        token_ids: list[int],
        written: list[int],
        seen: list[int],
    ) -> None:
        seq = sequence_name(engine_id)
        start = positions[0] if positions else len(seen)
        if positions != list(range(start, start + len(positions))):
            raise UnreadableIndexError(f"{seq}: positions {positions} are not consecutive")
        table = [slot // self._page for slot in seen[:: self._page]]
        for position, slot in enumerate(seen):
            block, offset = divmod(position, self._page)
            if slot != table[block] * self._page + offset:
                raise UnreadableIndexError(
                    f"{seq}: position {position} is read from slot {slot}, which fits no table"
                )
        before = self._tables.get(seq, [])
        self._tables[seq] = table
        keep = common_length(before, table)
        self._log.emit(
            record.Computed(
                step=self._log.step,
                rank=0,
                seq=seq,
                start=start,
                token_ids=token_ids,
                written_slots=written,
                table_keep=keep,
                table_new=table[keep:],
                read_len=len(seen),
            )
        )
