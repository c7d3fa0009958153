"""Leases of device sets. The devices are names; none of them need exist."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from preempt_harness.devices import (
    DevicesError,
    device_sets,
    found_devices,
    lease,
)

_FOUR = ["0", "1", "2", "3"]
_HOLDER = """
import sys
from pathlib import Path
from preempt_harness.devices import lease
held = lease(sys.argv[2].split(","), int(sys.argv[3]), Path(sys.argv[1]), timeout_s=0)
print(",".join(held.devices), flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def _holder(
    folder: Path, devices: list[str], size: int
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Another process that holds a lease."""
    arguments = [sys.executable, "-c", _HOLDER, str(folder), ",".join(devices), str(size)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process
        process.kill()


def test_sets_are_neighbours_and_the_rest_stays_unused() -> None:
    assert device_sets(_FOUR, 1) == [("0",), ("1",), ("2",), ("3",)]
    assert device_sets([*_FOUR, "4"], 2) == [("0", "1"), ("2", "3")]
    with pytest.raises(DevicesError, match=r"4 devices.*one set takes 5"):
        device_sets(_FOUR, 5)
    with pytest.raises(DevicesError, match="none"):
        device_sets([], 1)


def test_leases_share_no_device_and_end_when_all_are_taken(tmp_path: Path) -> None:
    with _holder(tmp_path, _FOUR, 2) as (first, _), _holder(tmp_path, _FOUR, 2) as (second, _):
        assert {first, second} == {"0,1", "2,3"}
        with pytest.raises(DevicesError, match="None of the 2 device sets"):
            lease(_FOUR, 2, tmp_path, timeout_s=0)


def test_sets_of_another_size_keep_off_devices_that_are_held(tmp_path: Path) -> None:
    with _holder(tmp_path, ["1"], 1):
        held = lease(_FOUR, 2, tmp_path, timeout_s=0)
        assert held.devices == ("2", "3")
        # A set of which only one device was free is left as it was found.
        other = lease(["0"], 1, tmp_path, timeout_s=0)
        assert other.devices == ("0",)
        other.release()
        held.release()


def test_the_lease_of_a_killed_process_is_free_again(tmp_path: Path) -> None:
    with _holder(tmp_path, ["7"], 1) as (_, process):
        with pytest.raises(DevicesError):
            lease(["7"], 1, tmp_path, timeout_s=0)
        process.send_signal(signal.SIGKILL)
        process.wait()
        lease(["7"], 1, tmp_path, timeout_s=0).release()


def test_a_released_lease_is_free_again(tmp_path: Path) -> None:
    held = lease(["7"], 1, tmp_path, timeout_s=0)
    held.release()
    held.release()
    lease(["7"], 1, tmp_path, timeout_s=0).release()


def test_a_lease_names_its_devices_to_cuda(tmp_path: Path) -> None:
    held = lease(["GPU-1a/b", "GPU-2"], 2, tmp_path, timeout_s=0)
    environ: dict[str, str] = {}
    held.export(environ)
    assert environ == {"CUDA_VISIBLE_DEVICES": "GPU-1a/b,GPU-2"}
    held.release()


def test_devices_are_found_in_the_environment_or_by_the_driver_s_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found_devices({"CUDA_VISIBLE_DEVICES": "3, 5"}) == ["3", "5"]
    assert found_devices({"CUDA_VISIBLE_DEVICES": ""}) == []
    monkeypatch.setenv("PATH", str(tmp_path))
    assert found_devices({}) == []
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: A (UUID: x)'\necho 'GPU 1: A (UUID: y)'\n")
    tool.chmod(0o755)
    assert found_devices({}) == ["0", "1"]
