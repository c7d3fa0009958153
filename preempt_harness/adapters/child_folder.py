"""A temporary folder for an engine's process, which ends by a signal and cannot tidy up by itself.

Whoever made it removes it. Was that one killed, too, the next one that makes a folder on this
machine does: beside each folder lies a lock, held for as long as its owner lives.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path

import filelock

_PREFIX = "preempt-harness-engine-"


class ChildFolder:
    """A new folder among the temporary files; folders of owners that are gone are removed.

    Attributes:
        path: of the folder.
    """

    def __init__(self) -> None:
        _remove_leftovers(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._lock = filelock.FileLock(_lock_of(self.path))
        self._lock.acquire()

    def remove(self) -> None:
        """With all that is in it; what cannot be removed stays."""
        shutil.rmtree(self.path, ignore_errors=True)
        _lock_of(self.path).unlink(missing_ok=True)
        self._lock.release()


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _remove_leftovers(root: Path) -> None:
    """Folders whose lock nobody holds. A folder without one was just made, and is left alone."""
    for path in root.glob(f"{_PREFIX}*.lock"):
        # Held: its owner lives. Not ours to open or gone by now: somebody else's to remove.
        with contextlib.suppress(filelock.Timeout, OSError), filelock.FileLock(path, timeout=0):
            shutil.rmtree(path.with_suffix(""), ignore_errors=True)
            path.unlink(missing_ok=True)
