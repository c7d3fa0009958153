"""Runs a server and outlives nobody: `python server_guard.py COMMAND ...`.

The server's whole process tree ends when the guard's standard input is closed, which also happens
when the process that holds the other end dies, however it dies. The guard ends as the server did:
with its exit status, or by its signal. Imports nothing of the harness, so that it starts quickly.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading

import psutil

_GRACE_S = 2.0  # for a server that is asked to end
_PR_SET_CHILD_SUBREAPER = 36  # prctl(2)


def main(command: list[str]) -> None:
    """Start the server, and end with it or when standard input is closed."""
    if sys.platform == "linux":  # processes that the server detaches stay below the guard
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        print(f"{command[0]} cannot be started: {error}", flush=True)
        os._exit(127)
    threading.Thread(target=_end_when_told, args=(server.pid,), daemon=True).start()
    status = server.wait()
    _end_tree()
    if status < 0:
        os.kill(os.getpid(), -status)  # whose default action nothing here has changed
    os._exit(status)


def _end_when_told(pid: int) -> None:
    """Wait for the end of standard input."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    psutil.wait_procs(psutil.Process().children(recursive=True), timeout=_GRACE_S)
    _end_tree()


def _end_tree() -> None:
    """Kill whatever is left below the guard."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            process.kill()


if __name__ == "__main__":
    main(sys.argv[1:])
