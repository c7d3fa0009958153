"""Layers of which every rank holds a part, and what they need of the other ranks.

Megatron's scheme (Shoeybi et al., 2019, https://arxiv.org/abs/1909.08053): a column-parallel layer
computes some of the outputs, a row-parallel layer takes some of the inputs and adds up its partial
results over the ranks. Between the two, everything is local. With one rank the layers are the plain
ones, bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from preempt_engine.layers.destination import Destination, TensorPart
from preempt_engine.layers.embedding import Embedding
from preempt_engine.layers.linear import Linear
from preempt_engine.layers.shard import Shard


class TensorParallel(Protocol):
    """The ranks of one engine. Every rank calls the same methods in the same order.

    Attributes:
        rank: of this process.
        size: number of ranks.
    """

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks, added in the order of ranks, the same bits on each of them.

        An element's bits depend on the ranks' elements at its place and on nothing else.
        """
        ...

    def gather(self, x: Tensor) -> list[Tensor]:
        """On rank 0 the tensors of all ranks, all of one shape; elsewhere an empty list."""
        ...

    def minimum(self, value: int) -> int:
        """The smallest of the ranks' values."""
        ...

    def close(self) -> None:
        """Leave the group."""
        ...


class SingleRank:
    """One rank: nobody to talk to."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        return [x]

    def minimum(self, value: int) -> int:
        return value

    def close(self) -> None:
        return None


class ColumnParallelLinear(Linear):
    """Some of the output features of one projection, or of several packed ones.

    Serves as the merged layer of gate and up and of query, key and value as well: each packed
    projection has its own shard, and key and value heads may be the same on several ranks.

    Args:
        in_features: K.
        shards: this rank's output features of each packed projection.
        bias: add one.
        dtype: of the parameters.
        device: of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        shards: Sequence[Shard],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        sizes = tuple(shard.size for shard in shards)
        super().__init__(in_features, sizes, bias=bias, dtype=dtype, device=device)
        self.shards = tuple(shards)

    def checkpoint_tensors(self, *prefixes: str) -> dict[str, Destination]:
        """Rows of each projection's weight and bias."""
        tensors = super().checkpoint_tensors(*prefixes)
        columns = self.weight.shape[1]
        for prefix, shard in zip(prefixes, self.shards, strict=True):
            weight = tensors[f"{prefix}.weight"]
            tensors[f"{prefix}.weight"] = _rows_of(weight, shard, columns)
            if self.bias is not None:
                bias = tensors[f"{prefix}.bias"]
                assert isinstance(bias, Tensor)
                tensors[f"{prefix}.bias"] = TensorPart(bias, (shard.total,), (shard.index,))
        return tensors


class RowParallelLinear(Linear):
    """All output features, from some of the input features, added up over the ranks.

    Args:
        shard: this rank's input features.
        out_features: N.
        bias: add one, once.
        parallel: the ranks.
        dtype: of the parameters.
        device: of the parameters.
    """

    def __init__(
        self,
        shard: Shard,
        out_features: int,
        *,
        bias: bool,
        parallel: TensorParallel,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(shard.size, (out_features,), bias=bias, dtype=dtype, device=device)
        self.shard = shard
        self.parallel = parallel

    def local(self, x: Tensor) -> Tensor:
        """The partial result; the bias waits until there is only one sum."""
        if self.parallel.size == 1:
            return super().local(x)
        return self.matmul(x, self.weight, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.parallel.size == 1:
            return self.local(x)
        output = self.parallel.all_reduce(self.local(x))  # [M, N]
        return output if self.bias is None else output + self.bias

    def checkpoint_tensors(self, *prefixes: str) -> dict[str, Destination]:
        """Columns of the weight, and the whole bias."""
        tensors = super().checkpoint_tensors(*prefixes)
        (prefix,) = prefixes
        rows = self.weight.shape[0]
        tensors[f"{prefix}.weight"] = TensorPart(
            self.weight.data, (rows, self.shard.total), (slice(0, rows), self.shard.index)
        )
        return tensors


class VocabParallelEmbedding(Embedding):
    """Some of the rows of a table; ids of other ranks' rows are looked up there.

    Every rank's table has the same number of rows, so that a head can share it; a rank with fewer
    ids has a row of zeros at its end.

    Args:
        shard: this rank's ids.
        size: of each vector.
        parallel: the ranks.
        dtype: of the table.
        device: of the table.
    """

    def __init__(
        self,
        shard: Shard,
        size: int,
        *,
        parallel: TensorParallel,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(_rows_per_rank(shard, parallel), size, dtype=dtype, device=device)
        self.weight.data[shard.size :] = 0
        self.shard = shard
        self.parallel = parallel

    def forward(self, ids: Tensor) -> Tensor:
        if self.parallel.size == 1:
            return super().forward(ids)
        local = ids - self.shard.start  # [T]
        elsewhere = (local < 0) | (local >= self.shard.size)
        vectors = super().forward(local.masked_fill(elsewhere, 0))  # [T, size]
        return self.parallel.all_reduce(vectors.masked_fill(elsewhere[:, None], 0))

    def checkpoint_tensors(self, prefix: str) -> dict[str, Destination]:
        """This rank's rows."""
        weight = self.weight.data[: self.shard.size]
        return {f"{prefix}.weight": _rows_of(weight, self.shard, self.weight.shape[1])}


class VocabParallelHead(Linear):
    """Logits of some of the ids, put together on rank 0.

    Args:
        in_features: width of a hidden state.
        shard: this rank's ids.
        parallel: the ranks.
        dtype: of the weight.
        device: of the weight.
    """

    def __init__(
        self,
        in_features: int,
        shard: Shard,
        *,
        parallel: TensorParallel,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        rows = _rows_per_rank(shard, parallel)
        super().__init__(in_features, (rows,), bias=False, dtype=dtype, device=device)
        self.weight.data[shard.size :] = 0
        self.shard = shard
        self.parallel = parallel

    def forward(self, x: Tensor) -> Tensor:
        """[R, in_features] -> [R, vocab] on rank 0, [0, vocab] elsewhere."""
        parts = self.parallel.gather(self.local(x))  # [R, rows] of each rank
        if not parts:
            return x.new_empty(0, self.shard.total)
        size = self.parallel.size
        shards = [Shard.of(self.shard.total, rank, size) for rank in range(size)]
        if size == 1:
            return parts[0]
        return torch.cat(
            [part[:, : shard.size] for part, shard in zip(parts, shards, strict=True)], dim=1
        )

    def checkpoint_tensors(self, *prefixes: str) -> dict[str, Destination]:
        """This rank's rows."""
        (prefix,) = prefixes
        weight = self.weight.data[: self.shard.size]
        return {f"{prefix}.weight": _rows_of(weight, self.shard, self.weight.shape[1])}


def _rows_per_rank(shard: Shard, parallel: TensorParallel) -> int:
    return -(-shard.total // parallel.size)


def _rows_of(tensor: Destination, shard: Shard, columns: int) -> TensorPart:
    assert isinstance(tensor, Tensor)
    return TensorPart(tensor, (shard.total, columns), (shard.index, slice(0, columns)))
