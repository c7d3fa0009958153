"""The part of a library's version that checkpoint files depend on."""

from __future__ import annotations

from importlib.metadata import version


def transformers_major() -> str:
    """Major version of transformers: the keys of config.json and the tokenizer's class follow it.

    It belongs into the names of cached folders, so that environments can share a cache.
    """
    return version("transformers").partition(".")[0]
