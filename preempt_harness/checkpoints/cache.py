"""The cache folder of checkpoints: where it is, and how one gets into it whole or not at all.

A checkpoint is built in a temporary folder and renamed into place under a file lock, with a
manifest of sizes and digests; a folder that does not fit its manifest is built again. The only
module that reads the environment. Knows nothing of what a checkpoint contains.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from preempt_harness.checkpoints.errors import CheckpointError

CACHE_VARIABLE = "PREEMPT_HARNESS_CACHE"
MANIFEST = "manifest.json"
# Larger files are checked by size alone each time, to stay quick; smaller ones by content.
_DIGEST_BYTES_MAX = 8 * 2**20
_PARTIAL = ".partial-"


def cache_root() -> Path:
    """`$PREEMPT_HARNESS_CACHE`, else `preempt-harness` in the user's XDG cache folder."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen).expanduser().absolute()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG base directory specification has relative paths ignored.
    base = Path(xdg) if Path(xdg).is_absolute() else Path.home() / ".cache"
    return base / "preempt-harness"


def cached_folder(name: str, build: Callable[[Path], None]) -> Path:
    """The folder of that name, built if it is absent or damaged.

    Safe between processes: one builds, the others wait for it. A build that is interrupted leaves
    nothing under `name`.

    Args:
        name: folder name; it must change whenever what `build` writes changes.
        build: fills the empty folder it is given.

    Raises:
        CheckpointError: the cache folder cannot be written.
    """
    root = cache_root()
    folder = root / name
    if is_intact(folder):
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{name}.lock"):
            if not is_intact(folder):
                _rebuild(folder, build)
    except PermissionError as error:
        raise CheckpointError(
            f"The cache folder {root} cannot be written: {error}.",
            f"Set the environment variable {CACHE_VARIABLE} to a folder that can.",
        ) from error
    return folder


def is_intact(folder: Path) -> bool:
    """True when the folder holds every file of its manifest, unchanged."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        return all(_entry(folder / name) == entry for name, entry in manifest.items())
    except (OSError, ValueError):  # absent, or not JSON
        return False


def _rebuild(folder: Path, build: Callable[[Path], None]) -> None:
    """Replace `folder`; the caller holds its lock, so any partial folder is a dead build's."""
    for leftover in folder.parent.glob(f"{folder.name}{_PARTIAL}*"):
        shutil.rmtree(leftover)
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}{_PARTIAL}", dir=folder.parent))
    try:
        build(partial)
        _write_manifest(partial)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_manifest(folder: Path) -> None:
    """Record all files, after they reached the disk: a rename may survive a power cut alone."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    manifest = {path.name: _entry(path) for path in files}
    path = folder / MANIFEST
    path.write_text(json.dumps(manifest, indent=1))
    for written in (*files, path):
        with written.open("rb") as file:
            os.fsync(file.fileno())


def _entry(path: Path) -> dict[str, int | str]:
    size = path.stat().st_size
    if size > _DIGEST_BYTES_MAX:
        return {"bytes": size}
    return {"bytes": size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
