"""A GGUF file again with another dtype, so that llama.cpp is compared on equal weights' size.

Takes a quantized file and writes its tensors in float32, or the matrices in bfloat16. The values
stay those of the quantized file: good for time, not for outputs. Needs the package `gguf`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize

_FILE_TYPES = {
    "float32": LlamaFileType.ALL_F32,
    "bfloat16": LlamaFileType.MOSTLY_BF16,
}


def convert(source: Path, target: Path, dtype: str) -> None:
    """Write `source` as `target`.

    Args:
        source: any GGUF file.
        target: overwritten.
        dtype: "float32" or "bfloat16".
    """
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kinds = field.types
        sub_type = kinds[-1] if kinds[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kinds[0], sub_type)
    writer.add_file_type(_FILE_TYPES[dtype])
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if dtype == "bfloat16" and values.ndim > 1:
            kind = GGMLQuantizationType.BF16
            writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
