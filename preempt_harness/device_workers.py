"""Pytest's side of the device leases: one set of GPUs for each process that runs tests.

Does nothing unless `--preempt-devices` (or its ini twin) is given.
"""

from __future__ import annotations

import os

import pytest

from preempt_harness import devices
from preempt_harness.marks import matrix_cells
from preempt_harness.options import Selection

# A crashed worker's successor may start before the system has cleared away the other.
TIMEOUT_S = 60.0

_LEASE = pytest.StashKey[devices.DeviceLease]()


def configure(config: pytest.Config, selection: Selection) -> None:
    """Lease a set where tests will run; on xdist's controller, see that there are enough.

    Raises:
        pytest.UsageError: too few devices, more workers than sets, or no set is free.
    """
    names = _names(selection)
    size = _set_size(config, selection)
    try:
        if _is_controller(config):
            num_sets = len(devices.device_sets(names, size))
            workers = len(config.getoption("tx", None) or ())
            if workers > num_sets:
                raise pytest.UsageError(
                    f"{workers} workers, and {num_sets} device sets of {size} among "
                    f"{', '.join(names)}: use -n {num_sets} or -n auto."
                )
            return
        lease = devices.lease(names, size, devices.lock_folder(), timeout_s=TIMEOUT_S)
    except devices.DevicesError as error:
        raise pytest.UsageError(f"--preempt-devices: {error}") from error
    lease.export(os.environ)
    config.stash[_LEASE] = lease


def unconfigure(config: pytest.Config) -> None:
    """Give the lease back, if there is one."""
    lease = config.stash.get(_LEASE, None)
    if lease is not None:
        lease.release()


def num_workers(config: pytest.Config, selection: Selection) -> int:
    """`-n auto`: as many workers as there are device sets.

    Raises:
        pytest.UsageError: there is not one.
    """
    try:
        return len(devices.device_sets(_names(selection), _set_size(config, selection)))
    except devices.DevicesError as error:
        raise pytest.UsageError(f"--preempt-devices: {error}") from error


def _names(selection: Selection) -> list[str]:
    if selection.devices == "auto":
        return devices.found_devices(os.environ)
    return [name.strip() for name in selection.devices.split(",") if name.strip()]


def _set_size(config: pytest.Config, selection: Selection) -> int:
    """Devices of the largest engine: of the matrix, or of --preempt-tp."""
    return max([selection.tp, *(cell.num_devices for cell in matrix_cells(config))])


def _is_controller(config: pytest.Config) -> bool:
    return not hasattr(config, "workerinput") and bool(config.getoption("tx", None))
