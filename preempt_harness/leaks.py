"""Whether a test left processes or shared memory behind."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

_SHARED_MEMORY = Path("/dev/shm")
_GRACE_S = 5.0  # a process that was told to end may need this long to be reaped


@dataclass(frozen=True)
class Snapshot:
    """Child processes of this process, and shared memory files of this user."""

    children: frozenset[int]
    shared_memory: frozenset[str]


def snapshot() -> Snapshot:
    """What there is now."""
    import psutil

    children = frozenset(child.pid for child in psutil.Process().children(recursive=True))
    return Snapshot(children, _own_shared_memory())


def check(before: Snapshot, allowed: frozenset[int] = frozenset()) -> None:
    """Fail the test if it left child processes or shared memory files behind.

    Args:
        before: what there was when the test began.
        allowed: processes that outlive the test on purpose, with all that they started.
    """
    import psutil

    before = Snapshot(before.children | _with_descendants(allowed), before.shared_memory)

    new_children = [
        child
        for child in psutil.Process().children(recursive=True)
        if child.pid not in before.children and not _belongs_to_multiprocessing(child)
    ]
    _, alive = psutil.wait_procs(new_children, timeout=_GRACE_S) if new_children else ([], [])
    left = [f"process {child.pid} ({_command(child)})" for child in alive]
    left += [f"shared memory {name}" for name in _own_shared_memory() - before.shared_memory]
    if left:
        for child in alive:
            child.kill()
        pytest.fail(f"The test left behind: {', '.join(left)}.", pytrace=False)


def _with_descendants(pids: frozenset[int]) -> frozenset[int]:
    import psutil

    found = set(pids)
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            found.update(child.pid for child in psutil.Process(pid).children(recursive=True))
    return frozenset(found)


def _belongs_to_multiprocessing(process: object) -> bool:
    """Python's own resource tracker and fork server live as long as this process does."""
    return "multiprocessing." in _command(process) and "spawn_main" not in _command(process)


def _command(process: object) -> str:
    import psutil

    try:
        return " ".join(process.cmdline())  # type: ignore[attr-defined]  # psutil.Process
    except psutil.Error:
        return "ended"


def _own_shared_memory() -> frozenset[str]:
    """Files there that belong to this user and to this process or a child of it.

    Other processes of the user, such as other test workers, use the same folder: only names that
    carry the id of this process, as the multiprocessing and torch names do, are counted.
    """
    if not _SHARED_MEMORY.is_dir():
        return frozenset()
    marker = str(os.getpid())
    return frozenset(entry.name for entry in _SHARED_MEMORY.iterdir() if marker in entry.name)
