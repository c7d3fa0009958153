"""All faults, by kind. A kind is a module with a tuple `FAULTS`."""

from __future__ import annotations

import importlib
from fnmatch import fnmatchcase
from functools import cache

from preempt_harness.faults.fault import Fault, UnknownFaultError

KINDS = (
    "returning",
    "tables",
    "prefix_cache",
    "chunks",
    "decisions",
    "sampling",
    "delivery",
    "request_state",
    "limits",
    "coming_and_going",
    "numbers",
    "workers",
    "swapping",
    "branches",
    "ranks",
    "speculation",
    "ahead",
    "precedence",
    "room",
    "leftovers",
    "reports",
    "texts",
    "pace",
    "branch_state",
    "coincidences",
    "worker_side",
    "way_back",
    "calls",
)


@cache
def all_faults() -> tuple[Fault, ...]:
    """Every fault, kind by kind."""
    return tuple(
        fault
        for kind in KINDS
        for fault in importlib.import_module(f"preempt_harness.faults.{kind}").FAULTS
    )


def kind_of(fault: Fault) -> str:
    """The kind that a fault is listed under, "" if it is none of the catalogue."""
    for kind in KINDS:
        if fault in importlib.import_module(f"preempt_harness.faults.{kind}").FAULTS:
            return kind
    return ""


def fault_named(name: str) -> Fault:
    """The fault of that name.

    Raises:
        UnknownFaultError: there is none.
    """
    for fault in all_faults():
        if fault.name == name:
            return fault
    raise UnknownFaultError(
        f"Fault {name!r} is unknown.", "`preempt-harness audit --list` names all."
    )


def select_faults(pattern: str) -> list[Fault]:
    """Faults whose name, or "kind/name", fits one of the comma-separated globs.

    Raises:
        UnknownFaultError: a glob fits none.
    """
    chosen: dict[str, Fault] = {}
    for glob in pattern.split(","):
        fitting = [
            fault
            for fault in all_faults()
            if fnmatchcase(fault.name, glob) or fnmatchcase(f"{kind_of(fault)}/{fault.name}", glob)
        ]
        if not fitting:
            raise UnknownFaultError(
                f"No fault fits {glob!r}.", "`preempt-harness audit --list` names all."
            )
        chosen.update((fault.name, fault) for fault in fitting)
    return [fault for fault in all_faults() if fault.name in chosen]
