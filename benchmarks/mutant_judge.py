"""Tests over many mutants, each in a forked child of a process that has imported everything.

    python -m benchmarks.mutant_judge JOB

Run by `benchmarks.mutation`, in a staged copy of the repository. Collects the tests once, runs them
in a child to see how long each takes, then forks a child for each mutant, in which the changed
functions get their changed code. The changed file lies on disk meanwhile, for processes that a test
starts. What a fork cannot show, such as a changed constant or default, is tested in a new process
instead, and so is all with `fresh`. The first failure ends it. Tests that find most in a second go
first; the order is learnt on the way.

A test may take 10 times its own processor time and 3 s; then the mutant counts as a timeout.
"""

from __future__ import annotations

import gc
import os
import resource
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType

import msgspec
import pytest

_SLACK_FACTOR = 10.0  # a test may take so many times its own processor time
_SILENCE_S = 300.0  # wall seconds without a test begun, after which a child is killed
_MOST_BYTES = 4 * 2**30  # of a child's own memory: a loop without end may fill a list
_CO_OPTIMIZED = 0x1  # flag of a function's code, as against a class's or module's


class Change(msgspec.Struct, frozen=True):
    """A file, relative to the working folder, and its changed text."""

    path: str
    text: str


class Group(msgspec.Struct, frozen=True):
    """Who judges: tests of a kind. A later group judges what an earlier one let pass."""

    name: str
    paths: list[str]


class Verdict(msgspec.Struct, frozen=True):
    """What became of a mutant.

    Attributes:
        outcome: "killed", "timeout" or "survived".
        group: that noticed it.
        test: that noticed it.
        cpu_s: processor seconds of it all.
    """

    outcome: str
    group: str = ""
    test: str = ""
    cpu_s: float = 0.0


class Job(msgspec.Struct, frozen=True):
    """What a judging process does.

    Attributes:
        groups: in order.
        changes: to judge, each by itself.
        arguments: more of pytest's.
        verdicts: file to write a line to for each change.
        fresh: judge each in a new process.
        times: test -> processor seconds; instead of running the tests without a change.
        slack_s: processor seconds that any test may take in addition.
    """

    groups: list[Group]
    changes: list[Change]
    arguments: list[str]
    verdicts: str
    fresh: bool = False
    times: dict[str, float] | None = None
    slack_s: float = 3.0


@dataclass
class _Test:
    """A collected test, how long it takes without a change, and what it has found."""

    item: pytest.Item
    group: int
    cpu_s: float = 0.0
    num_kills: int = 0

    @property
    def worth(self) -> float:
        """Mutants it may find in a second; one that has found none yet is given half of one."""
        return (self.num_kills + 0.5) / (self.cpu_s + 0.01)


@dataclass
class Judge:
    """The pytest plugin that does it in place of running the tests."""

    job: Job
    problem: str = ""
    _tests: list[_Test] = field(default_factory=list)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            self.problem = "the tests cannot be collected"
            return True
        self._tests = [_Test(item, self._group_of(item)) for item in session.items]
        if self.job.times is None:
            self._measure(session)
        else:
            for test in self._tests:
                test.cpu_s = self.job.times.get(test.item.nodeid, 0.0)
        if not self.problem:
            with Path(self.job.verdicts).open("ab") as verdicts:
                for change in self.job.changes:
                    verdicts.write(msgspec.json.encode(self._judge(session, change)) + b"\n")
                    verdicts.flush()
        return True

    def _group_of(self, item: pytest.Item) -> int:
        for index, group in enumerate(self.job.groups):
            if any(item.path.is_relative_to(Path(path).resolve()) for path in group.paths):
                return index
        raise LookupError(f"{item.nodeid} is of no group")

    def _measure(self, session: pytest.Session) -> None:
        """Run each test without a change."""
        order = list(range(len(self._tests)))
        child = Child(lambda send: self._run(session, order, send, stop=False, limited=False))
        started = time.perf_counter()
        for kind, index, cpu_s in child.messages():
            if kind == "failed":
                self.problem += f"{self._tests[index].item.nodeid} fails on the unchanged source\n"
            elif kind == "passed":
                self._tests[index].cpu_s = cpu_s
        if child.signal:
            self.problem += f"killed by signal {child.signal} on the unchanged source\n"
        wall = time.perf_counter() - started
        print(f"{len(self._tests)} tests: {child.cpu_s:.1f} s of processor, {wall:.1f} s of wall")
        for test in sorted(self._tests, key=lambda test: -test.cpu_s)[:8]:
            print(f"  {test.cpu_s:6.2f} s {test.item.nodeid}")
        sys.stdout.flush()

    def _judge(self, session: pytest.Session, change: Change) -> Verdict:
        path = Path(change.path)
        before = path.read_text()
        codes = None if self.job.fresh else new_codes(before, change.text, str(path.resolve()))
        order = sorted(
            range(len(self._tests)),
            key=lambda index: (self._tests[index].group, -self._tests[index].worth),
        )

        def work(send: Send) -> None:
            if codes is None:
                self._start_anew(order, send)
            for function, code in codes or ():
                function.__code__ = code
            self._run(session, order, send, stop=True, limited=True)

        path.write_text(change.text)
        try:
            child = Child(work)
            running = failed = -1
            for kind, index, _ in child.messages():
                if kind == "begun":
                    running = index
                elif kind == "failed":
                    failed = index
        finally:
            path.write_text(before)
        if failed < 0 and not child.signal and not child.status:
            return Verdict("survived", cpu_s=child.cpu_s)
        found_by = failed if failed >= 0 else running
        if found_by < 0:
            return Verdict("killed", "import", "", child.cpu_s)
        test = self._tests[found_by]
        timeout = failed < 0 and child.signal in (signal.SIGPROF, signal.SIGKILL)
        if not timeout:
            test.num_kills += 1
        name = self.job.groups[test.group].name
        return Verdict("timeout" if timeout else "killed", name, test.item.nodeid, child.cpu_s)

    def _run(
        self,
        session: pytest.Session,
        order: Sequence[int],
        send: Send,
        *,
        stop: bool,
        limited: bool,
    ) -> None:
        """Run tests, in a child; with `stop` until the first fails."""
        for index, following in zip(order, [*order[1:], None], strict=True):
            test = self._tests[index]
            after = None if following is None else self._tests[following].item
            failures = session.testsfailed
            send("begun", index, 0.0)
            if limited:
                limit = self.job.slack_s + _SLACK_FACTOR * test.cpu_s
                signal.setitimer(signal.ITIMER_PROF, limit)
            started = time.process_time()
            test.item.config.hook.pytest_runtest_protocol(item=test.item, nextitem=after)
            send("passed", index, time.process_time() - started)
            if session.testsfailed > failures:
                send("failed", index, 0.0)
                if stop:
                    return

    def _start_anew(self, order: Sequence[int], send: Send) -> None:
        """Become a new process that runs the tests in this order."""
        numbered = [(self._tests[index].item.nodeid, index) for index in order]
        job = msgspec.structs.replace(
            self.job,
            changes=[],
            times={test.item.nodeid: test.cpu_s for test in self._tests},
        )
        order_file = Path(f"{self.job.verdicts}.order")
        order_file.write_bytes(msgspec.json.encode((job, numbered)))
        os.set_inheritable(send.pipe, True)
        module = "benchmarks.mutant_judge"
        os.execv(
            sys.executable,
            [sys.executable, "-m", module, "--anew", str(order_file), str(send.pipe)],
        )


@dataclass
class Anew(Judge):
    """The same, in a new process: the changed file is imported, and one run is done."""

    numbered: list[tuple[str, int]] = field(default_factory=list)  # tests, in order
    send: Send | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        assert self.send is not None
        times = self.job.times or {}
        if session.testsfailed:
            self.problem = "the tests cannot be collected"
            return True
        items = {item.nodeid: item for item in session.items}
        there = [(name, number) for name, number in self.numbered if name in items]
        self._tests = [_Test(items[name], 0, times[name]) for name, _ in there]
        numbered = Send(self.send.pipe, [number for _, number in there])
        self._run(session, range(len(there)), numbered, stop=True, limited=True)
        return True


@dataclass
class Send:
    """Tells the parent what a child does."""

    pipe: int
    numbers: Sequence[int] | None = None

    def __call__(self, kind: str, index: int, cpu_s: float) -> None:
        number = index if self.numbers is None else self.numbers[index]
        os.write(self.pipe, f"{kind} {number} {cpu_s}\n".encode())


class Child:
    """A forked process, and what it says.

    Args:
        work: what it does.

    Attributes:
        cpu_s, signal, status: known when its messages have ended.
    """

    def __init__(self, work: Callable[[Send], None]) -> None:
        self.cpu_s = 0.0
        self.signal = 0
        self.status = 0
        sys.stdout.flush()
        sys.stderr.flush()
        self._read, write = os.pipe()
        self._process = os.fork()
        if self._process == 0:
            status = 70
            try:
                os.setpgid(0, 0)
                os.close(self._read)
                resource.setrlimit(resource.RLIMIT_DATA, (_MOST_BYTES, _MOST_BYTES))
                silence()
                work(Send(write))
                status = 0
            finally:
                os._exit(status)
        os.close(write)

    def messages(self) -> Iterator[tuple[str, int, float]]:
        """All of them, until it has ended."""
        rest = b""
        while True:
            readable, _, _ = select.select([self._read], [], [], _SILENCE_S)
            if not readable:
                self._kill_all()
            part = os.read(self._read, 65536)
            if not part:
                break
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                kind, index, cpu_s = line.decode().split()
                yield kind, int(index), float(cpu_s)
        os.close(self._read)
        _, status, usage = os.wait4(self._process, 0)
        self.cpu_s = usage.ru_utime + usage.ru_stime
        self.signal = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        self.status = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 0
        self._kill_all()

    def _kill_all(self) -> None:
        """The child, and what it may have left running."""
        with suppress(ProcessLookupError):
            os.killpg(self._process, signal.SIGKILL)


def silence() -> None:
    """Nothing that a mutant prints is of interest."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)


def new_codes(before: str, after: str, path: str) -> list[tuple[FunctionType, CodeType]] | None:
    """Which functions of this process get which code, so that it runs the changed file.

    Args:
        before: text of the file as it was imported.
        after: its changed text.
        path: of the file.

    Returns:
        None when the change is not in the body of functions alone, or cannot be made here.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            old = compile(before, path, "exec")
            new = compile(after, path, "exec")
    except SyntaxError:
        return None
    old_codes, new_ones = dict(_functions(old)), dict(_functions(new))
    one_a_line = len(old_codes) == sum(1 for _ in _functions(old))
    if not one_a_line or _skeleton(old) != _skeleton(new) or old_codes.keys() != new_ones.keys():
        return None
    changed = {
        key for key, code in new_ones.items() if _contents(code) != _contents(old_codes[key])
    }
    found = [
        (function, new_ones[key])
        for function in _live_functions(path)
        if (key := _key(function.__code__)) in changed
    ]
    if {_key(code) for _, code in found} != changed:
        return None
    if any(function.__code__.co_freevars != code.co_freevars for function, code in found):
        return None
    return found


@cache
def _live_functions(path: str) -> list[FunctionType]:
    """Of the file; all were there when the tests had been collected."""
    files = {path, os.path.relpath(path)}
    return [
        thing
        for thing in gc.get_objects()
        if type(thing) is FunctionType and os.path.normpath(thing.__code__.co_filename) in files
    ]


def _key(code: CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno


def _functions(code: CodeType) -> Iterator[tuple[tuple[str, int], CodeType]]:
    """The outermost functions in a module's code."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_flags & _CO_OPTIMIZED:
                yield _key(constant), constant
            else:
                yield from _functions(constant)


def _contents(code: CodeType) -> object:
    """What makes two codes do the same."""
    constants = [
        _contents(constant) if isinstance(constant, CodeType) else (type(constant), repr(constant))
        for constant in code.co_consts
    ]
    return code.co_code, code.co_names, code.co_varnames, code.co_exceptiontable, constants


def _skeleton(code: CodeType) -> object:
    """The same of all that is run when a module is imported: no functions' bodies."""
    constants = [
        _skeleton(constant)
        if isinstance(constant, CodeType) and not constant.co_flags & _CO_OPTIMIZED
        else _key(constant)
        if isinstance(constant, CodeType)
        else (type(constant), repr(constant))
        for constant in code.co_consts
    ]
    return code.co_code, code.co_names, code.co_exceptiontable, constants


def main() -> int:
    """Judge a job's changes; exit status 1 if the unchanged source does not pass."""
    if sys.argv[1] == "--anew":
        job, numbered = msgspec.json.decode(
            Path(sys.argv[2]).read_bytes(), type=tuple[Job, list[tuple[str, int]]]
        )
        judge: Judge = Anew(job, numbered=numbered, send=Send(int(sys.argv[3])))
    else:
        judge = Judge(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Job))
    paths = [path for group in judge.job.groups for path in group.paths]
    options = ["-q", "-s", "--no-header", "--no-summary", "-p", "no:cacheprovider"]
    status = pytest.main([*options, *judge.job.arguments, *paths], plugins=[judge])
    if judge.problem:
        print(judge.problem, file=sys.stderr)
    return 1 if judge.problem or status not in (pytest.ExitCode.OK, 5) else 0


if __name__ == "__main__":
    sys.exit(main())
