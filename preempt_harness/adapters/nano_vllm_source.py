"""Loads the parts of nano-vllm that need no GPU: scheduler, block manager, sequence, preparation.

`import nanovllm` asks for CUDA, flash-attn and triton; what is loaded here does not. Of its model
runner only the methods that prepare a step's inputs are taken, with plain lists in place of
tensors, so that what they hand to the attention backend is the engine's own. Releases and commits
from June 2025 to April 2026 differ in their signatures; callers probe.
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType
from typing import Any

from preempt_harness.errors import HarnessError

PATH_VARIABLE = "PREEMPT_NANO_VLLM_PATH"
PACKAGE = "nano-vllm-fork"
_PREPARATION = ("prepare_block_tables", "prepare_prefill", "prepare_decode")


class NanoVllmSourceError(HarnessError):
    """A folder is no nano-vllm that this adapter can load."""


def find_source() -> tuple[Path, str] | None:
    """Folder of the `nanovllm` package and its version; None when there is none.

    A checkout named by the environment variable PREEMPT_NANO_VLLM_PATH goes before the package.
    """
    named = os.environ.get(PATH_VARIABLE, "")
    return _checkout(Path(named).absolute()) if named else _installed()


@lru_cache(maxsize=8)  # asked for in every trial
def _checkout(folder: Path) -> tuple[Path, str]:
    return folder.resolve() / "nanovllm", f"checkout {folder.name}"


@lru_cache(maxsize=1)
def _installed() -> tuple[Path, str] | None:
    try:
        found = distribution(PACKAGE)
    except PackageNotFoundError:
        return None
    return Path(str(found.locate_file("nanovllm"))), found.version


class NanoVllm:
    """One loaded copy of the engine's modules, as one of its processes has them.

    Args:
        folder: of the `nanovllm` package.

    Attributes:
        scheduler_class, sequence_class, sampling_params_class: the engine's own.
        status: the engine's `SequenceStatus`.

    Raises:
        NanoVllmSourceError: it lacks a module, or is of a layout that is not known.
    """

    def __init__(self, folder: Path) -> None:
        self._modules: dict[str, ModuleType] = _packages(folder)
        try:
            with self.registered():
                scheduler = importlib.import_module("nanovllm.engine.scheduler")
                sequence = importlib.import_module("nanovllm.engine.sequence")
                params = importlib.import_module("nanovllm.sampling_params")
                self._modules = {n: m for n, m in sys.modules.items() if _is_own(n)}
            self.scheduler_class: Any = scheduler.Scheduler
            self.sequence_class: Any = sequence.Sequence
            self.status: Any = sequence.SequenceStatus
            self.sampling_params_class: Any = params.SamplingParams
            self._context = _run(folder / "utils" / "context.py", keep=None)
            runner = _run(folder / "engine" / "model_runner.py", keep=_PREPARATION)
            runner["set_context"] = self._context["set_context"]
            self._preparation = {name: runner[name] for name in _PREPARATION}
        except (ImportError, OSError, SyntaxError, KeyError, AttributeError) as error:
            raise NanoVllmSourceError(
                f"{folder} is no nano-vllm that can be loaded: {type(error).__name__}: {error}.",
                f"Let {PATH_VARIABLE} name a checkout of nano-vllm, or install {PACKAGE}.",
            ) from error

    @contextmanager
    def registered(self) -> Iterator[None]:
        """Within, `nanovllm` names this copy: modules import each other, and pickles find it."""
        others = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_own(name)}
        sys.modules.update(self._modules)
        try:
            yield
        finally:
            for name in [name for name in sys.modules if _is_own(name)]:
                del sys.modules[name]
            sys.modules.update(others)

    def prepare(self, sequences: Sequence[Any], is_prefill: bool, block_size: int) -> Prepared:
        """What the engine's model runner hands to its model and its attention backend.

        Raises:
            Exception: whatever the engine's preparation raises.
        """
        name = "prepare_prefill" if is_prefill else "prepare_decode"
        input_ids, positions = self._preparation[name](
            _Runner(self._preparation, block_size), list(sequences)
        )
        return Prepared(input_ids, positions, self._context["get_context"]())


class Prepared:
    """A prepared step: flat lists over all its sequences.

    Attributes:
        input_ids, positions: of all tokens.
        context: the engine's own `Context`, with lists in place of tensors.
    """

    def __init__(self, input_ids: list[int], positions: list[int], context: Any) -> None:
        self.input_ids = input_ids
        self.positions = positions
        self.context = context


def _packages(folder: Path) -> dict[str, ModuleType]:
    """Packages without their `__init__`, and a configuration module without transformers."""
    packages = {}
    for name, place in (("nanovllm", folder), ("nanovllm.engine", folder / "engine")):
        packages[name] = ModuleType(name)
        packages[name].__path__ = [str(place)]
    packages["nanovllm.config"] = ModuleType("nanovllm.config")
    packages["nanovllm.config"].__dict__["Config"] = object
    return packages


def _is_own(name: str) -> bool:
    return name == "nanovllm" or name.startswith("nanovllm.")


def _run(path: Path, keep: tuple[str, ...] | None) -> dict[str, Any]:
    """Run a source file without its imports, or these methods of its classes only."""
    tree = ast.parse(path.read_text(), str(path))
    if keep is None:
        body = [node for node in tree.body if not _imports_torch(node)]
    else:
        body = [
            node
            for owner in tree.body
            if isinstance(owner, ast.ClassDef)
            for node in owner.body
            if isinstance(node, ast.FunctionDef) and node.name in keep
        ]
    namespace: dict[str, Any] = {"torch": _Torch(), "Sequence": object, "__name__": path.stem}
    exec(compile(ast.Module(body, []), str(path), "exec", dont_inherit=True), namespace)
    return namespace


def _imports_torch(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import) and any(alias.name == "torch" for alias in node.names)


class _Tensor(list[Any]):
    """A list that can be "moved to the device"."""

    def cuda(self, *args: object, **options: object) -> _Tensor:
        return self


class _Torch:
    """Stands for torch where the preparation makes tensors, which are of integers."""

    Tensor = _Tensor

    @staticmethod
    def tensor(data: Sequence[Any], **options: object) -> _Tensor:
        if float in set(map(type, data)):
            return _Tensor(map(int, data))  # cut off, as torch does
        return _Tensor(data)

    def __getattr__(self, name: str) -> None:
        return None


class _Buffer(dict[int, Any]):
    """A pinned buffer of the model runner: set by index, read by a leading slice."""

    def __getitem__(self, key: Any) -> Any:
        return _Tensor(self.get(index) for index in range(key.stop))


class _Runner:
    """Stands for the model runner: its block size, its buffers, its methods of preparation."""

    def __init__(self, preparation: dict[str, Callable[..., Any]], block_size: int) -> None:
        self.block_size = block_size
        self._preparation = preparation
        self._buffers: dict[str, _Buffer] = {}

    def __getattr__(self, name: str) -> Any:
        if name in self._preparation:
            return self._preparation[name].__get__(self)
        if name.startswith("_cpu_"):
            return self._buffers.setdefault(name, _Buffer())
        raise AttributeError(f"the model runner's {name} is not known to this adapter")
