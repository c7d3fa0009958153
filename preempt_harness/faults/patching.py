"""Plants faults: compiles changed source into functions that keep their identity.

A function's code object is exchanged, not an attribute, so that every reference to the function
runs the fault, imported names and properties included. The source is read from the running engine:
where a fault's text is not found exactly once, the engine has changed and planting fails. Every
changed place reports that it was reached.
"""

from __future__ import annotations
import __future__

import ast
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

from preempt_harness.faults.fault import REACHED, Fault, FaultTargetError, Patch

_MARKER = "__fault_reached__"
_FUTURE_FLAGS = sum(
    getattr(__future__, name).compiler_flag for name in __future__.all_feature_names
)


@dataclass(eq=False)
class PlantedFault:
    """A fault in place.

    Attributes:
        fault: which.
        num_reached: how often a faulty line ran.
        on_first: called when it runs for the first time.
    """

    fault: Fault
    num_reached: int = 0
    on_first: Callable[[], None] | None = field(default=None, repr=False)

    def reach(self) -> bool:
        """A faulty line is about to run; always true, so that it can stand in a condition."""
        self.num_reached += 1
        if self.num_reached == 1 and self.on_first is not None:
            self.on_first()
        return True


@contextmanager
def plant(fault: Fault, on_first: Callable[[], None] | None = None) -> Iterator[PlantedFault]:
    """The engine of this process has the fault until the context ends.

    Args:
        fault: which; one at a time.
        on_first: called when the faulty line first runs.

    Raises:
        FaultTargetError: the code that it replaces has changed.
    """
    planted = PlantedFault(fault, on_first=on_first)
    changed = [
        (function, _changed_code(fault, function, patches))
        for function, patches in _by_function(fault).items()
    ]
    originals = [(function, function.__code__) for function, _ in changed]
    try:
        for function, code in changed:
            function.__globals__[_MARKER] = planted.reach
            function.__code__ = code
        yield planted
    finally:
        for function, code in originals:
            function.__code__ = code
            function.__globals__.pop(_MARKER, None)


def _by_function(fault: Fault) -> dict[FunctionType, list[Patch]]:
    found: dict[FunctionType, list[Patch]] = {}
    for patch in fault.patches:
        found.setdefault(_unplanted(fault, patch.target), []).append(patch)
    return found


def _unplanted(fault: Fault, target: str) -> FunctionType:
    function = target_of(fault, target)
    if _MARKER in function.__globals__:
        raise FaultTargetError(
            f"Fault {fault.name}: the module of {target} has a fault already.",
            "Plant one fault at a time.",
        )
    return function


def target_of(fault: Fault, target: str) -> FunctionType:
    """The function that a patch changes.

    Raises:
        FaultTargetError: there is none.
    """
    module_name, _, path = target.partition(":")
    try:
        value: Any = importlib.import_module(module_name)
        for name in path.split("."):
            value = inspect.getattr_static(value, name)
    except (ImportError, AttributeError) as error:
        raise FaultTargetError(
            f"Fault {fault.name}: {target} does not exist ({error}).", _ADVICE
        ) from error
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if not isinstance(value, FunctionType) or value.__closure__:
        raise FaultTargetError(
            f"Fault {fault.name}: {target} is no plain function.", "Choose the function itself."
        )
    return value


_ADVICE = "The engine has changed: write the fault anew for its present code."


def _changed_code(fault: Fault, function: FunctionType, patches: list[Patch]) -> CodeType:
    source = textwrap.dedent(inspect.getsource(function))
    places = [(_place(fault, source, patch), patch) for patch in patches]
    lines: list[int] = []
    shift = 0
    # From the top down, so that lines noted before stay where they are.
    for (index, old), patch in sorted(places, key=lambda item: item[0]):
        new = _indented(patch.new.replace(REACHED, f"{_MARKER}()"), _indent(source, index + shift))
        if REACHED not in patch.new and patch.reached:
            lines.append(source.count("\n", 0, index + shift) + 1)
        source = source[: index + shift] + new + source[index + shift + len(old) :]
        shift += len(new) - len(old)
    tree = ast.parse(source)
    for line in lines:
        _mark(tree, line)
    ast.fix_missing_locations(tree)
    compiled = compile(
        tree,
        f"<fault {fault.name}>",
        "exec",
        flags=function.__code__.co_flags & _FUTURE_FLAGS,
        dont_inherit=True,
    )
    return _code_of(compiled, function.__name__)


def _place(fault: Fault, source: str, patch: Patch) -> tuple[int, str]:
    """Where the old text stands, and how: it must stand there once."""
    first = patch.old.partition("\n")[0]
    found = []
    index = source.find(first)
    while index >= 0:
        old = _indented(patch.old, _indent(source, index))
        if source.startswith(old, index):
            found.append((index, old))
        index = source.find(first, index + 1)
    if len(found) != 1:
        raise FaultTargetError(
            f"Fault {fault.name}: {patch.target} contains {len(found)} times, not once: "
            f"{patch.old!r}.",
            _ADVICE,
        )
    return found[0]


def _indent(source: str, index: int) -> str:
    """Indentation of the line of a place."""
    line = source[source.rfind("\n", 0, index) + 1 :]
    return line[: len(line) - len(line.lstrip(" "))]


def _indented(text: str, indent: str) -> str:
    """The text with all lines but the first indented."""
    return text.replace("\n", f"\n{indent}")


def _mark(tree: ast.Module, line: int) -> None:
    """Insert a call of the marker before the innermost statement that covers the line."""
    body, position = _innermost(tree, line)
    call = ast.parse(f"{_MARKER}()").body[0]
    for node in ast.walk(call):
        if isinstance(node, ast.stmt | ast.expr):
            node.lineno = node.end_lineno = 0  # never the innermost statement of another line
    body.insert(position, call)


def _innermost(tree: ast.Module, line: int) -> tuple[list[ast.stmt], int]:
    best: tuple[list[ast.stmt], int] | None = None
    smallest = 0
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if not isinstance(body, list) or node is tree:
                continue
            for position, statement in enumerate(body):
                first, last = statement.lineno, statement.end_lineno or statement.lineno
                if first <= line <= last and (best is None or last - first <= smallest):
                    best, smallest = (body, position), last - first
    if best is None:
        definition = tree.body[0]
        assert isinstance(definition, ast.FunctionDef)
        return definition.body, 0
    return best


def _code_of(compiled: CodeType, name: str) -> CodeType:
    for constant in compiled.co_consts:
        if isinstance(constant, CodeType) and constant.co_name == name:
            return constant
    raise AssertionError(f"{name} is not defined by its own source")
