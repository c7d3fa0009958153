"""Worker processes: how they start, how they end, and what they leave to say why.

A worker is a fresh interpreter that inherits one end of a socket pair and one unlinked file; there
are no names, no ports and no shared memory that could be left behind or taken by another engine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from preempt_engine.executor.channel import Channel

# The worker gets the driver's import path, whatever made it.
_BOOTSTRAP = (
    "import sys; sys.path[:] = sys.argv[4:]; "
    "from preempt_engine.executor.worker_process import main; main(*map(int, sys.argv[1:4]))"
)
_STACK_DUMP_S = 0.5
_REAP_S = 5.0


@dataclass(slots=True)
class WorkerProcess:
    """One rank's process as the driver sees it.

    Attributes:
        rank: tensor parallel rank.
        process: the interpreter.
        channel: the driver's end of the socket.
        stacks: where the worker's `faulthandler` writes.
    """

    rank: int
    process: subprocess.Popen[bytes]
    channel: Channel
    stacks: IO[bytes]

    def exit_text(self) -> str:
        """How the process ended; it has ended, or is about to."""
        try:
            code = self.process.wait(timeout=_REAP_S)
        except subprocess.TimeoutExpired:
            return "closed its connection without ending"
        if code >= 0:
            return f"exited with code {code}"
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
        return f"was killed by signal {-code}"

    def read_stacks(self) -> str:
        """What `faulthandler` has written so far."""
        self.stacks.seek(0)
        return self.stacks.read().decode(errors="replace")

    def dump_stacks(self) -> str:
        """Have the process write the stacks of its threads; "" if it cannot, for instance stopped.

        Works while the worker computes: `faulthandler` needs no interpreter lock.
        """
        before = len(self.read_stacks())
        self.process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + _STACK_DUMP_S
        while time.monotonic() < deadline:
            time.sleep(0.01)
            text = self.read_stacks()[before:]
            if text and text == self.read_stacks()[before:]:
                return text
        return ""

    def kill(self) -> None:
        """End the process now; may be called twice."""
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=_REAP_S)
        self.channel.close()
        self.stacks.close()


def start_worker(rank: int, environment: dict[str, str], inherited: Sequence[int]) -> WorkerProcess:
    """Start the process of one rank.

    Args:
        rank: tensor parallel rank.
        environment: variables to add where the user has not set them.
        inherited: more file descriptors that stay open in the worker, under the same numbers.
    """
    ours, theirs = socket.socketpair()
    stacks = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - lives as long as the process
    try:
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                _BOOTSTRAP,
                str(rank),
                str(theirs.fileno()),
                str(stacks.fileno()),
                *sys.path,
            ],
            pass_fds=(theirs.fileno(), stacks.fileno(), *inherited),
            stdin=subprocess.DEVNULL,
            env={**environment, **os.environ},
            # Ctrl-C reaches the driver only, even before the worker could ask to ignore it.
            process_group=0,
        )
    except BaseException:
        ours.close()
        stacks.close()
        raise
    finally:
        theirs.close()
    return WorkerProcess(rank, process, Channel(ours), stacks)


def kill_all(workers: Sequence[WorkerProcess], owner_pid: int) -> None:
    """Kill and reap; does nothing in a forked copy of the process that started them."""
    if os.getpid() != owner_pid:
        return
    for worker in workers:  # all of them first: a rank that loses a peer may begin to wait for it
        worker.process.kill()
    for worker in workers:
        worker.kill()
