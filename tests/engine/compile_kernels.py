"""Compiles every Triton kernel for a GPU, without one; prints a JSON object a kernel.

A program of its own: in the tests' process, kernels are interpreted. Arguments: compute
capabilities, such as 80 90.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from preempt_engine.kernels import attention as launcher
from preempt_engine.kernels import layers as layer_launcher
from preempt_engine.kernels.jit import attention, blocks, layers

_FLOATS = {"scale": "fp32", "eps": "fp32"}
_POINTERS = {
    "tables": "*i32",
    "query_start": "*i32",
    "read_lens": "*i32",
    "items": "*i32",
    "row_tiles": "*i32",
    "slot_mapping": "*i64",
    "block_ids": "*i64",
    "partial_output": "*fp32",
    "partial_highest": "*fp32",
    "partial_total": "*fp32",
}
_TENSORS = (
    *("query", "keys", "values", "key", "value", "result"),
    *("x", "weight", "bias", "output", "pool", "buffer"),
)


def main(capabilities: list[int]) -> None:
    for capability in capabilities:
        for element in ("bf16", "fp32"):
            for program, sizes in _programs(element):
                compiled = _compile(program, element, sizes, capability)
                print(
                    json.dumps(
                        {
                            "kernel": program.__name__,
                            "capability": capability,
                            "element": element,
                            "shared": compiled.metadata.shared,
                            "fused": compiled.asm["ptx"].count("fma.rn"),
                        }
                    )
                )


def _programs(element: str) -> list[tuple[Any, dict[str, Any]]]:
    shared = {
        "group": 4,
        "slots": 4,
        "split": launcher.SPLIT,
        "rows": launcher.ROWS,
        "head_dim": 64,
        "dim": 64,
    }
    tiles = {"rows": layer_launcher.ROWS, "columns": layer_launcher.COLUMNS, "depth": 32}
    return [
        (attention.attend, shared | {"block_size": 16, "tile": launcher.TILE}),
        (attention.finish, shared),
        (blocks.write_kv, {"width": 192, "padded_width": 256}),
        (blocks.gather_blocks, {"chunk": 1024}),
        (blocks.scatter_blocks, {"chunk": 1024}),
        (layers.matmul, tiles | {"has_bias": True, "widen": element == "fp32"}),
        (layers.rms_norm, {"padded_size": 1024}),
        (layers.layer_norm, {"padded_size": 1024}),
    ]


def _compile(program: Any, element: str, sizes: dict[str, Any], capability: int) -> Any:
    signature = {name: _type(name, element, sizes) for name in program.arg_names}
    constants = {(program.arg_names.index(name),): value for name, value in sizes.items()}
    source = ASTSource(fn=program, signature=signature, constexprs=constants)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"enable_fp_fusion": False})


def _type(name: str, element: str, sizes: dict[str, Any]) -> str:
    if name in sizes:
        return "constexpr"
    if name in _TENSORS:
        return f"*{element}"
    return _POINTERS.get(name) or _FLOATS.get(name, "i32")


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]])
