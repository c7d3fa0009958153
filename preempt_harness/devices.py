"""Sets of GPUs for processes that run side by side, each leased by one of them.

A lease is a file lock a device. The system drops a lock when its process ends, however it ends, so
the process that takes a crashed worker's place finds its set free. Devices are names here, as
CUDA_VISIBLE_DEVICES has them: indices or UUIDs; nothing asks the devices themselves. This is the
one module that reads and sets that variable.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import MutableMapping, Sequence
from pathlib import Path

import filelock

from preempt_harness.errors import HarnessError

VARIABLE = "CUDA_VISIBLE_DEVICES"
_POLL_S = 0.1


class DevicesError(HarnessError, RuntimeError):
    """There are too few devices, or none is free."""


class DeviceLease:
    """Devices that are this process's own until `release`, or until it ends.

    Args:
        devices: their names.
        locks: one each, held.
    """

    def __init__(self, devices: Sequence[str], locks: Sequence[filelock.BaseFileLock]) -> None:
        self.devices = tuple(devices)
        self._locks = list(locks)

    def export(self, environ: MutableMapping[str, str]) -> None:
        """Let CUDA, once it starts in this process or in a child, see these devices only."""
        environ[VARIABLE] = ",".join(self.devices)

    def release(self) -> None:
        """Give them back. Further calls do nothing."""
        while self._locks:
            self._locks.pop().release()


def device_sets(devices: Sequence[str], size: int) -> list[tuple[str, ...]]:
    """Neighbouring devices, `size` at a time; those left over stay unused.

    Raises:
        DevicesError: they are too few for one set.
    """
    if len(devices) < size:
        raise DevicesError(
            f"There are {len(devices)} devices ({', '.join(devices) or 'none'}), and one set "
            f"takes {size}.",
            "Use fewer ranks, or list more devices in --preempt-devices.",
        )
    return [tuple(devices[i : i + size]) for i in range(0, len(devices) - size + 1, size)]


def lease(devices: Sequence[str], size: int, folder: Path, *, timeout_s: float) -> DeviceLease:
    """The first free set.

    Args:
        devices: all that may be used.
        size: devices of a set.
        folder: of the lock files; the same for all processes that share the devices.
        timeout_s: longest wait for a set, in seconds.

    Raises:
        DevicesError: too few devices, or none came free in time.
    """
    sets = device_sets(devices, size)
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + timeout_s
    while True:
        for names in sets:
            if (locks := _try_locks(names, folder)) is not None:
                return DeviceLease(names, locks)
        if time.monotonic() >= deadline:
            raise DevicesError(
                f"None of the {len(sets)} device sets came free within {timeout_s:g} s: "
                f"{'; '.join(','.join(names) for names in sets)}.",
                "Start at most one worker for each set (-n auto does), or end the other session.",
            )
        time.sleep(_POLL_S)


def found_devices(environ: MutableMapping[str, str]) -> list[str]:
    """CUDA devices of this machine that the environment lets a process see.

    `nvidia-smi` is asked where the variable is not set; torch is not loaded.
    """
    if VARIABLE in environ:
        return [name.strip() for name in environ[VARIABLE].split(",") if name.strip()]
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    listed = subprocess.run([program, "-L"], capture_output=True, text=True, check=False)
    count = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    return [str(index) for index in range(count)]


def lock_folder() -> Path:
    """Where all sessions of this user on this machine keep their locks."""
    return Path(tempfile.gettempdir()) / f"preempt-harness-devices-{os.getuid()}"


def _try_locks(names: Sequence[str], folder: Path) -> list[filelock.BaseFileLock] | None:
    locks: list[filelock.BaseFileLock] = []
    for name in names:
        lock = filelock.FileLock(folder / f"{_file_name(name)}.lock")
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            for taken in locks:
                taken.release()
            return None
        locks.append(lock)
    return locks


def _file_name(device: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-." else "_" for letter in device)
