"""Ways for a tensor-parallel rank to go wrong, as `worker_hooks`. Kept light: workers import it.

worker_hooks=("benchmarks.worker_faults:at_step:kill 1 7",)     # kind, rank, step
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from preempt_engine.executor.protocol import Runner
    from preempt_engine.step import LogitsBatch, SchedulerOutput, SequenceKey


def kill() -> None:
    """Dies as the system kills a process for its memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def abort() -> None:
    """Dies as a library does that finds its own state broken."""
    os.abort()


def leave() -> None:
    """Ends quietly in the middle of a step."""
    os._exit(3)


def fail() -> None:
    """Raises an ordinary exception."""
    raise ValueError("planted in this rank")


def exhaust_memory() -> None:
    """Asks for more memory than it may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, hard))
    bytearray(1 << 34)


def stall() -> None:
    """Waits for something that never comes."""
    signal.sigwait({signal.SIGUSR2})


def spin() -> None:
    """Computes for ever."""
    while True:
        pass


def stop() -> None:
    """Is stopped by a signal, and cannot even say where it is."""
    os.kill(os.getpid(), signal.SIGSTOP)


KINDS: dict[str, Callable[[], None]] = {
    "kill": kill,
    "abort": abort,
    "leave": leave,
    "fail": fail,
    "exhaust_memory": exhaust_memory,
    "stall": stall,
    "spin": spin,
    "stop": stop,
}


def at_step(runner: Runner, argument: str) -> None:
    """Plant a fault: "kind rank step", before that step is computed in that rank."""
    kind, rank, step_id = argument.split()
    if runner.rank == int(rank):
        _before_step(runner, int(step_id), KINDS[kind])


def after_step(runner: Runner, argument: str) -> None:
    """Plant a fault: "kind rank step", when the step is computed and not yet acknowledged."""
    kind, rank, step_id = argument.split()
    if runner.rank != int(rank):
        return
    execute = runner.execute

    def wrapped(step: SchedulerOutput) -> LogitsBatch:
        logits = execute(step)
        if step.step_id == int(step_id):
            KINDS[kind]()
        return logits

    _replace_execute(runner, wrapped)


def at_start(runner: Runner, argument: str) -> None:
    """Plant a fault: "kind rank", before the rank says that it is ready."""
    kind, rank = argument.split()
    if runner.rank == int(rank):
        KINDS[kind]()


def slow_steps(runner: Runner, argument: str) -> None:
    """Every step takes so many seconds longer, on every rank."""
    execute = runner.execute

    def wrapped(step: SchedulerOutput) -> LogitsBatch:
        time.sleep(float(argument))
        return execute(step)

    _replace_execute(runner, wrapped)


def _before_step(runner: Runner, step_id: int, action: Callable[[], None]) -> None:
    execute = runner.execute

    def wrapped(step: SchedulerOutput) -> LogitsBatch:
        if step.step_id == step_id:
            action()
        return execute(step)

    _replace_execute(runner, wrapped)


def _replace_execute(runner: Runner, wrapped: Callable[[SchedulerOutput], LogitsBatch]) -> None:
    runner.execute = wrapped  # type: ignore[assignment, method-assign]


# Ranks that disagree ------------------------------------------------------------------------------


def default_block_size(runner: Runner, argument: str) -> None:
    """ "rank": this rank never learns the block size, and places tokens as if it were 16."""
    if runner.rank == int(argument):
        runner.state.block_size = 16


def late_drops(runner: Runner, argument: str) -> None:
    """ "rank": this rank hears of dropped sequences one step late."""
    if runner.rank != int(argument):
        return
    execute = runner.execute
    late: list[SequenceKey] = []

    def wrapped(step: SchedulerOutput) -> LogitsBatch:
        dropped, late[:] = list(late), step.dropped
        step.dropped = dropped
        return execute(step)

    _replace_execute(runner, wrapped)


def lost_block(runner: Runner, argument: str) -> None:
    """ "rank step": from that step on, the first table with two blocks lacks its first."""
    rank, step_id = map(int, argument.split())
    if runner.rank == rank:
        _change_a_table(runner, step_id, lambda table: table.__delitem__(0))


def exchanged_blocks(runner: Runner, argument: str) -> None:
    """ "rank step": from that step on, the first table with two blocks has them exchanged."""
    rank, step_id = map(int, argument.split())
    if runner.rank == rank:
        _change_a_table(runner, step_id, lambda table: table.insert(1, table.pop(0)))


def no_ids_on_resume(runner: Runner) -> None:
    """A sequence that comes back arrives without its token ids, on every rank."""
    execute = runner.execute
    known: set[SequenceKey] = set()

    def wrapped(step: SchedulerOutput) -> LogitsBatch:
        for item in step.scheduled:
            if item.reset and item.key in known:
                item.new_token_ids = []
            known.add(item.key)
        return execute(step)

    _replace_execute(runner, wrapped)


def _change_a_table(runner: Runner, step_id: int, change: Callable[[list[int]], None]) -> None:
    pending = [True]

    def change_once() -> None:
        for sequence in runner.state.sequences.values():
            if pending and len(sequence.block_table) > 1:
                change(sequence.block_table)
                pending.clear()

    execute = runner.execute

    def wrapped(step: SchedulerOutput) -> LogitsBatch:
        if step.step_id >= step_id:
            change_once()
        return execute(step)

    _replace_execute(runner, wrapped)


def refuse_modules(runner: Runner, argument: str) -> None:
    """Fail at every step in which one of these modules is imported."""
    execute = runner.execute

    def wrapped(step: SchedulerOutput) -> LogitsBatch:
        logits = execute(step)
        loaded = [name for name in argument.split() if name in sys.modules]
        assert not loaded, f"imported in this rank: {loaded}"
        return logits

    _replace_execute(runner, wrapped)
