"""Asking for memory before it is needed."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

CACHE_LINE = 64  # bytes


@intrinsic
def fetch(typing_context: Any, array: Any, *indices: Any) -> Any:
    """LLVM's `prefetch` of one element's line, for reading, into every cache."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array_type, index_types = signature.args[0], signature.args[1]
        struct = context.make_array(array_type)(context, builder, arguments[0])
        where = [
            context.cast(builder, value, index_type, types.intp)
            for value, index_type in zip(
                cgutils.unpack_tuple(builder, arguments[1]), index_types, strict=True
            )
        ]
        address = cgutils.get_item_pointer(context, builder, array_type, struct, where)
        byte, integer = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [byte, integer, integer, integer]),
            "llvm.prefetch.p0",
        )
        read, all_caches, data = (ir.Constant(integer, value) for value in (0, 3, 1))
        builder.call(function, [builder.bitcast(address, byte), read, all_caches, data])
        return context.get_dummy_value()

    return types.void(array, types.StarArgTuple.from_types(indices)), generate
