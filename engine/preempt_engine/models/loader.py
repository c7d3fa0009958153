"""Weights from a directory of safetensors into a model's parameters, one tensor at a time.

A model names, for every tensor a checkpoint must hold, the *destination*: a view into one of its
(often packed) parameters. The loader owns finding files, reading and the account of what is
missing, unexpected or of the wrong shape. It knows no architecture. Tensors are read through
`get_slice`, so a rank of a tensor-parallel group can read its part only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from preempt_engine.errors import ModelNotFoundError, UnsupportedModelError
from preempt_engine.layers.destination import Destination, TensorPart
from preempt_engine.models.config_reader import read_json

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
# Buffers that old versions of transformers saved and that follow from the configuration.
_DERIVED_SUFFIXES = ("rotary_emb.inv_freq", "attn.masked_bias")


def load_weights(
    directory: Path,
    destinations: Mapping[str, Destination],
    is_ignored: Callable[[str], bool] = lambda name: False,
) -> None:
    """Fill every destination from the checkpoint.

    Args:
        directory: holds `model.safetensors`, or shards with their index.
        destinations: tensor name in the checkpoint -> view to fill, by the whole tensor or by a
            part of it, and then only that part is read; dtype and device may differ from the
            file's.
        is_ignored: says of a name that it may be there and is not needed, such as a tied head.

    Raises:
        ModelNotFoundError: no readable safetensors are there.
        UnsupportedModelError: tensors are missing, unexpected or of another shape; all are named.
    """
    missing = set(destinations)
    problems: list[str] = []
    for name, tensor_slice in _tensors(directory):
        destination = destinations.get(name)
        if destination is None:
            if not is_ignored(name) and not name.endswith(_DERIVED_SUFFIXES):
                problems.append(f"unexpected {name}")
            continue
        missing.discard(name)
        part = _as_part(destination)
        shape = list(tensor_slice.get_shape())
        if shape == list(part.shape):
            part.tensor.copy_(tensor_slice[part.index])
        else:
            problems.append(f"{name} has shape {shape}, expected {list(part.shape)}")
    problems += [f"missing {name}" for name in sorted(missing)]
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" * (len(problems) > 8))
        raise UnsupportedModelError(
            f"The tensors in {directory} do not fit its config.json: {shown}.",
            "Take config.json and the weights from the same source.",
        )


def _as_part(destination: Destination) -> TensorPart:
    if isinstance(destination, TensorPart):
        return destination
    shape = tuple(destination.shape)
    return TensorPart(destination, shape, tuple(slice(0, size) for size in shape))


def _tensors(directory: Path) -> Iterator[tuple[str, Any]]:
    """(name, lazy slice) of every tensor of the checkpoint, file by file."""
    for path in weight_files(directory):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                    yield name, file.get_slice(name)
        except (SafetensorError, OSError) as error:
            raise ModelNotFoundError(
                f"{path} is not a readable safetensors file: {error}.",
                "Download or save the checkpoint again.",
            ) from error


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files that make up the checkpoint.

    Raises:
        ModelNotFoundError: there are none, or the index names a file that is not there.
    """
    if (directory / _SINGLE).is_file():
        return [directory / _SINGLE]
    index = read_json(directory / _INDEX)
    if index is not None:
        files = [directory / name for name in sorted(set(index.get("weight_map", {}).values()))]
        # An index is data from outside: it may name files beside it and nothing else.
        absent = [p.name for p in files if p.parent != directory or not p.is_file()]
        if files and not absent:
            return files
        raise ModelNotFoundError(
            f"{directory / _INDEX} names shards that are not there: {absent}.",
            "Download the missing shards.",
        )
    raise _no_weights(directory)


def _no_weights(directory: Path) -> ModelNotFoundError:
    pickled = sorted(p.name for p in directory.iterdir() if p.suffix in _PICKLED_SUFFIXES)
    if pickled:
        return ModelNotFoundError(
            f"{directory} holds pickled weights only ({', '.join(pickled[:3])}); "
            "loading them would run code from the file.",
            "Convert it once with transformers: "
            "AutoModelForCausalLM.from_pretrained(path).save_pretrained(new_path).",
        )
    return ModelNotFoundError(
        f"{directory} holds neither {_SINGLE} nor {_INDEX}.",
        "Give a checkpoint whose weights are saved as safetensors.",
    )
