"""What the model runner needs of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor, nn

from preempt_engine.attention.protocol import AttentionPlan, LayerKVCache
from preempt_engine.layers.destination import Destination


class CausalLM(Protocol):
    """A decoder on flattened tokens: no batch dimension, sequences lie one after another."""

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[LayerKVCache],
        attention: AttentionPlan,
    ) -> Tensor:
        """Hidden states after the last norm.

        Args:
            input_ids: int64 [T].
            positions: int64 [T], of each token within its sequence.
            kv_caches: one per layer.
            attention: this step's plan; T may exceed its tokens, the surplus rows are padding.

        Returns:
            [T, hidden_size].
        """
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden_size] -> [R, vocab_size] on rank 0, [0, vocab_size] on other ranks."""
        ...

    def checkpoint_tensors(self) -> dict[str, Destination]:
        """Tensor name in a Hugging Face checkpoint -> view of the parameter that holds it, or
        this rank's part of it."""
        ...

    def modules(self) -> Iterator[nn.Module]:
        """Every layer, outermost first."""
        ...
