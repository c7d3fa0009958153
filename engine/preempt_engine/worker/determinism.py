"""The start-up probe of `deterministic=True`: do this machine's kernels treat rows alike?

Every operation that mixes a batch is run on the engine's own shapes and weights with several
numbers of rows; a row must have the same bits in each. If padding to a small multiple is not
enough, a larger one is tried, then pieces of a fixed size, and at last the engine refuses to
start. The probe measures; it cannot prove: shapes between the probed ones are taken on trust.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from preempt_engine.attention.protocol import AttentionBackend, AttentionMetadata, LayerKVCache
from preempt_engine.attention.torch_tiled import TILE
from preempt_engine.errors import DeterminismError
from preempt_engine.kernels import availability
from preempt_engine.layers.activation import GatedActivation, PlainActivation
from preempt_engine.layers.linear import FixedRowsMatmul, Linear, Matmul
from preempt_engine.layers.norm import LayerNorm, RMSNorm
from preempt_engine.layers.parallel import SingleRank, TensorParallel
from preempt_engine.layers.row_plan import RowPlan
from preempt_engine.models.config import ModelConfig

# Measured with MKL in float32 (torch 2.13, an AVX2 CPU, 1 and 2 threads): products of 1, 2, 3, 5,
# 6, 7 or 9 rows give a row other bits; the multiples of 8 that were tried, up to 2048, do not.
# Fixed pieces are for libraries that switch kernels with the number of rows.
CANDIDATES = (
    RowPlan(8),
    RowPlan(16),
    RowPlan(32),
    RowPlan(16, fixed=True),
    RowPlan(64, fixed=True),
)
_SINGLE_RANK = SingleRank()
# Numbers of rows to try before padding; the token budget is added.
_ROW_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 31, 64, 100, 256)
# Multiply-adds one product of the probe may cost; bounds the rows tried on a wide layer.
_MAX_COST = 10**9


@dataclass(frozen=True, slots=True)
class RowOperation:
    """An operation on [M, width] whose rows should not depend on each other.

    Attributes:
        name: for the error.
        width: of a row.
        cost: multiply-adds per row.
        run: the operation.
    """

    name: str
    width: int
    cost: int
    run: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class ProbeSetting:
    """What the probe needs to know of the engine.

    Attributes:
        model: sizes.
        dtype: of activations.
        device: of everything.
        block_size: tokens per block.
        max_num_batched_tokens: most rows of a step.
    """

    model: ModelConfig
    dtype: torch.dtype
    device: torch.device
    block_size: int
    max_num_batched_tokens: int


def choose_row_plan(
    modules: Sequence[nn.Module],
    make_attention: Callable[[RowPlan], AttentionBackend],
    setting: ProbeSetting,
    candidates: Sequence[RowPlan] = CANDIDATES,
    parallel: TensorParallel = _SINGLE_RANK,
    matmul: Matmul | None = None,
) -> RowPlan:
    """The first candidate under which every operation is batch-invariant; installs it.

    Ranks agree on one plan: their collectives must have the same shapes.

    Args:
        modules: the model's layers; their `Linear` layers are left set up for the result.
        make_attention: the attention backend for a row plan.
        setting: of the engine.
        candidates: in order of preference.
        parallel: the ranks, each of which probes its own part.
        matmul: the product of plans that fix no number of rows; None takes torch's.

    Raises:
        DeterminismError: none will do; names the operation that failed last.
    """
    operations = distinct_operations(modules)
    failed = ""
    for row_plan in candidates:
        install_row_plan(modules, row_plan, matmul)
        failed = next(_variant_operations(operations, make_attention, setting, row_plan), "")
        if parallel.minimum(not failed):
            return row_plan
    failed = failed or "an operation on another rank"
    raise DeterminismError(
        f"deterministic=True: {failed} in {setting.dtype} on {setting.device} gives a row other "
        f"bits in another batch, even with {candidates[-1]}.",
        "Use deterministic=False, another dtype (float32 is the safest) or another device.",
    )


def install_row_plan(
    modules: Sequence[nn.Module], row_plan: RowPlan, matmul: Matmul | None = None
) -> None:
    """Make every `Linear` compute as the plan says; `matmul` as in `choose_row_plan`."""
    for module in modules:
        if isinstance(module, Linear):
            module.matmul = matmul or module.product
            if row_plan.fixed:
                module.matmul = FixedRowsMatmul(row_plan.multiple, module.product)


def install_invariant_kernels(
    modules: Sequence[nn.Module], device: torch.device
) -> tuple[Sequence[RowPlan], Matmul | None]:
    """Give norms their Triton kernels on a GPU that has them; torch's depend on the batch there.

    Returns:
        candidates and product for `choose_row_plan`: with Triton's product no padding is needed.
    """
    if device.type != "cuda" or availability.unusable(device):
        return CANDIDATES, None
    from preempt_engine.kernels import layers

    for module in modules:
        if isinstance(module, RMSNorm):
            module.kernel = layers.rms_norm
        elif isinstance(module, LayerNorm):
            module.kernel = layers.layer_norm
    return (RowPlan(1), *CANDIDATES), layers.matmul


def distinct_operations(modules: Sequence[nn.Module]) -> list[RowOperation]:
    """One operation per kind of layer and shape."""
    found: dict[tuple[object, ...], RowOperation] = {}
    for module in modules:
        if isinstance(module, Linear):
            rows, width = module.weight.shape
            key: tuple[object, ...] = ("linear", rows, width, module.bias is None)
            name, cost = f"the linear layer [{rows}, {width}]", rows * width
        elif isinstance(module, RMSNorm | LayerNorm):
            width = cost = module.weight.shape[0]
            key = (type(module), width)
            name = f"{type(module).__name__} of width {width}"
        elif isinstance(module, GatedActivation | PlainActivation):
            width = cost = module.size * (2 if isinstance(module, GatedActivation) else 1)
            key = (type(module), width)
            name = f"the activation of width {module.size}"
        else:
            continue
        run = module.local if isinstance(module, Linear) else module
        found.setdefault(key, RowOperation(name, width, cost, run))
    return list(found.values())


def _variant_operations(
    operations: Sequence[RowOperation],
    make_attention: Callable[[RowPlan], AttentionBackend],
    setting: ProbeSetting,
    row_plan: RowPlan,
) -> Iterator[str]:
    for operation in operations:
        if not rows_are_independent(operation, setting, row_plan):
            yield operation.name
    if not attention_is_independent(make_attention(row_plan), setting):
        yield "attention"


def rows_are_independent(operation: RowOperation, setting: ProbeSetting, row_plan: RowPlan) -> bool:
    """True if a row has the same bits in every probed batch, at every probed place in it."""
    most = max(64, min(setting.max_num_batched_tokens, 2048, _MAX_COST // operation.cost))
    counts = {row_plan.padded(min(count, most)) for count in (*_ROW_COUNTS, most)}
    generator = torch.Generator().manual_seed(0)
    longest = max(counts)
    rows = torch.randn(longest + 1, operation.width, generator=generator)
    rows = rows.to(setting.device, setting.dtype)
    expected = operation.run(rows[:longest])
    for count in sorted(counts):
        if not torch.equal(operation.run(rows[:count]), expected[:count]):
            return False
    # The same rows at other places: one row later in the batch, and in reverse order.
    shifted = operation.run(rows[1 : longest + 1])[:-1]
    reversed_rows = operation.run(rows[:longest].flip(0)).flip(0)
    return torch.equal(shifted, expected[1:]) and torch.equal(reversed_rows, expected)


def attention_is_independent(backend: AttentionBackend, setting: ProbeSetting) -> bool:
    """True if decode, chunks and a full prefill give a query the same bits."""
    length = 2 * TILE + 9  # three tiles, the last one mostly empty
    model, block_size = setting.model, setting.block_size
    num_blocks = -(-length // block_size)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        values = torch.randn(*shape, model.head_dim, generator=generator)
        return values.to(setting.device, setting.dtype)

    cache = LayerKVCache(
        random(num_blocks, block_size, model.num_key_value_heads),
        random(num_blocks, block_size, model.num_key_value_heads),
    )
    query = random(length, model.num_attention_heads)
    expected = _attend(backend, query, cache, [(0, length)], setting)
    batches = [
        [(p, p + 1) for p in (0, 1, 2, 62, 63, 64, 65, 127, 128, length - 1)],
        [(length - 1, length)],
        [(5, 6)] * 3,
        [(0, 3)],
        [(60, 70), (length - 1, length), (TILE, length), (7, 8)],
    ]
    for batch in batches:
        queries = torch.cat([query[start:end] for start, end in batch])
        wanted = torch.cat([expected[start:end] for start, end in batch])
        if not torch.equal(_attend(backend, queries, cache, batch, setting), wanted):
            return False
    return True


def _attend(
    backend: AttentionBackend,
    query: Tensor,
    cache: LayerKVCache,
    chunks: Sequence[tuple[int, int]],
    setting: ProbeSetting,
) -> Tensor:
    """Attention of chunks [start, end) of one stored sequence, each as a sequence of its own."""
    query_start = [0]
    for start, end in chunks:
        query_start.append(query_start[-1] + end - start)
    table = torch.arange(cache.key_blocks.shape[0], dtype=torch.int32, device=setting.device)
    slots = [slot for start, end in chunks for slot in range(start, end)]
    metadata = AttentionMetadata(
        query_start=query_start,
        read_lens=[end for _, end in chunks],
        slot_mapping=torch.tensor(slots, device=setting.device),
        block_tables=table.expand(len(chunks), -1),
        block_size=setting.block_size,
    )
    return backend.plan(metadata).attend(query, cache, None)
