"""What a fault is. Data only; `patching` applies it, and knows no fault."""

from __future__ import annotations

from dataclasses import dataclass

from preempt_harness.errors import HarnessError

REACHED = "reached()"
"""In the text of a patch: true, and counts. For faults that are wrong under a condition only."""


class FaultError(HarnessError):
    """Base of what can go wrong with faults."""


class UnknownFaultError(FaultError, KeyError):
    """No fault has that name."""

    def __str__(self) -> str:  # KeyError would show the representation
        return f"{self.message} {self.advice}"


class FaultTargetError(FaultError):
    """The code that a fault replaces is not what the fault was written for."""


@dataclass(frozen=True)
class Patch:
    """Lines of one function, replaced.

    Attributes:
        target: "module:Class.method" or "module:function".
        old: text that the function's source has exactly once.
        new: what stands there instead. Lines after the first, of both, are indented relative to
            the line in which the text begins. Where it says `reached()`, that counts as reaching
            the fault; otherwise its first line does.
        reached: False for a patch that only prepares another, and counts nothing.
    """

    target: str
    old: str
    new: str
    reached: bool = True


def before(target: str, place: str, text: str, *, reached: bool = True) -> Patch:
    """A patch that puts lines before a place; arguments as of `Patch`."""
    return Patch(target, place, f"{text}\n{place}", reached)


def after(target: str, place: str, text: str, *, reached: bool = True) -> Patch:
    """A patch that puts lines behind a place; arguments as of `Patch`."""
    return Patch(target, place, f"{place}\n{text}", reached)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One recreated bug.

    Attributes:
        name: kebab-case.
        mechanism: the mistake, in a sentence.
        source: where it was seen; "mechanism" for one of the same kind that nobody reported.
        expected: beginnings of the finding codes that should tell of it: "KVSAN", "TOK", ...
        patches: what is changed, all together.
        model: the model that it takes.
        needs: capabilities of the engine without which it cannot show.
    """

    name: str
    mechanism: str
    source: str
    expected: tuple[str, ...]
    patches: tuple[Patch, ...]
    model: str = "exact"
    needs: frozenset[str] = frozenset()
