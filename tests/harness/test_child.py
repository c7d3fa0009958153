"""Sessions in a child process: the same as here, and every death of the child is told apart."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from preempt_harness.adapters.child import ChildHost, EngineProcessError
from preempt_harness.adapters.child_folder import ChildFolder
from preempt_harness.adapters.protocol import EngineSettings
from preempt_harness.errors import UnsupportedTrialError
from preempt_harness.record import (
    AnyEvent,
    EngineError,
    Resumed,
    Scheduled,
    StepLaunched,
    TrialRecord,
)
from preempt_harness.trial import Trial, run_trial
from preempt_harness.workload import RequestSpec, SamplingSpec, Workload
from tests.plugin.conftest import ROOT, SOURCE_PATHS
from tests.plugin.foreign_adapter import ForeignAdapter, ForeignSession
from tests.plugin.foreign_engine import crash

# A hang costs its test this much; a live toy step needs microseconds.
POLL_TIMEOUT_S = 3.0
WAIT_S = 120.0  # for things that must happen, on a machine however slow


@pytest.fixture
def host() -> Iterator[ChildHost]:
    host = ChildHost(ForeignAdapter(), POLL_TIMEOUT_S)
    yield host
    host.close()


def make_trial(bug: str = "") -> Trial:
    """r0 has ended when r1 is preempted; `bug` strikes in step 6, when r1 is back."""
    return Trial(
        engine="foreign",
        settings=EngineSettings(
            num_blocks=20, block_size=4, options={"bug": bug} if bug else {}, model="toy"
        ),
        workload=Workload(
            requests=[
                RequestSpec(
                    id=f"r{index}",
                    prompt_token_ids=[4 + index] * 7,
                    sampling=SamplingSpec(max_tokens=max_tokens),
                )
                for index, max_tokens in enumerate((3, 12))
            ]
        ),
        plan="preempt:r1@out=5",
    )


def run(host: ChildHost, bug: str = "") -> TrialRecord:
    return run_trial(make_trial(bug), ForeignAdapter(), open_session=host.open)


def error_of(record: TrialRecord) -> EngineError:
    [error] = [event for event in record.events if isinstance(event, EngineError)]
    return error


def test_one_child_serves_many_sessions_and_records_what_a_session_here_does(
    host: ChildHost,
) -> None:
    here = run_trial(make_trial(), ForeignAdapter())
    assert run(host) == here
    pid = host.pid
    assert run(host) == here
    assert host.pid == pid


@pytest.mark.parametrize(
    ("bug", "kind", "message"),
    [
        ("exit", "exit", "exited with status 3"),
        ("segfault", "signal", "killed by SIGSEGV"),
        ("c_loop", "hang", "did not answer 'poll' for 3 s"),
    ],
)
def test_a_death_is_named_and_placed_and_the_child_replaced(
    host: ChildHost, bug: str, kind: str, message: str
) -> None:
    record = run(host, bug)
    error = error_of(record)
    assert (error.kind, error.step) == (kind, 6)
    assert message in error.message
    assert host.pid is None
    assert not [event for event in run(host).events if isinstance(event, EngineError)]


def test_the_schedule_of_the_step_that_killed_the_engine_is_kept(host: ChildHost) -> None:
    """The session streams what a step decided before the step is launched."""
    events = [event for event in run(host, "exit").events if event.step == 6]
    assert Resumed(step=6, request="r1", num_cached_tokens=8) in events
    assert Scheduled(step=6, seq="r1.0", start=8, end=12) in events
    assert StepLaunched(step=6) in events


def test_results_of_a_dead_child_are_what_it_had_given(host: ChildHost) -> None:
    whole = run(host)
    record = run(host, "exit")
    assert record.results["r0"] == whole.results["r0"]
    assert not record.results["r1"].finished
    assert record.results["r1"].outputs[0].token_ids == whole.results["r1"].outputs[0].token_ids[:5]


def test_a_child_in_which_the_engine_raised_serves_no_further_session(host: ChildHost) -> None:
    """After an exception an engine may have left anything behind in its process."""
    record = run(host, "exception")
    error = error_of(record)
    assert (error.kind, error.step) == ("EngineFaultError", 6)
    assert "foreign_engine.py" in error.traceback
    assert Scheduled(step=6, seq="r1.0", start=8, end=12) in record.events
    assert record.results["r1"].outputs[0].token_ids
    assert host.pid is None


def test_a_hang_shows_where_the_engine_stood(host: ChildHost) -> None:
    error = error_of(run(host, "stall"))
    assert error.kind == "hang"
    assert 'foreign_engine.py", line' in error.traceback
    assert "in crash" in error.traceback


def test_an_interrupted_call_ends_the_child(
    host: ChildHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reply would otherwise be read as that of the next call."""
    session = host.open(make_trial().settings)
    session.submit(make_trial().workload.requests[0])

    def interrupt(connection: Connection, timeout: float) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Connection, "poll", interrupt)
        with pytest.raises(KeyboardInterrupt):
            session.poll(1.0)
    assert host.pid is None
    assert not [event for event in run(host).events if isinstance(event, EngineError)]


def test_closing_twice_leaves_no_process(host: ChildHost) -> None:
    run(host)
    assert host.pid is not None
    process = psutil.Process(host.pid)
    host.close()
    host.close()
    assert not process.is_running()


# What can be wrong with an adapter ----------------------------------------------------------------


class TalkativeAdapter(ForeignAdapter):
    """Dies while it is opened, after a last word."""

    def open(self, settings: EngineSettings) -> ForeignSession:
        print("loading weights: no such file", flush=True)
        os._exit(9)


class LitteringAdapter(ForeignAdapter):
    """Leaves a temporary folder in every process that opens it."""

    def open(self, settings: EngineSettings) -> ForeignSession:
        print(tempfile.mkdtemp(), flush=True)
        os._exit(9)


class NeedyAdapter(ForeignAdapter):
    """Cannot be built by its class alone."""

    def __init__(self, path: str) -> None:
        self.path = path


class RefusingAdapter(ForeignAdapter):
    """Cannot honour what is asked."""

    def open(self, settings: EngineSettings) -> ForeignSession:
        raise UnsupportedTrialError("There is no model 'toy'.", "Use another.")


def local_adapter() -> ForeignAdapter:
    class LocalAdapter(ForeignAdapter):
        """Cannot be imported."""

    return LocalAdapter()


def open_with(adapter: ForeignAdapter) -> None:
    host = ChildHost(adapter, POLL_TIMEOUT_S)
    try:
        host.open(make_trial().settings)
    finally:
        assert host.pid is None
        host.close()


def test_what_the_engine_printed_before_it_died_is_shown() -> None:
    with pytest.raises(EngineProcessError, match="exited with status 9") as caught:
        open_with(TalkativeAdapter())
    assert "loading weights: no such file" in caught.value.traceback
    assert any("loading weights" in note for note in caught.value.__notes__)


def test_temporary_files_of_the_engine_go_with_its_process() -> None:
    with pytest.raises(EngineProcessError) as caught:
        open_with(LitteringAdapter())
    (folder,) = re.findall(r"^/.+$", caught.value.traceback, re.MULTILINE)
    assert not Path(folder).exists()
    assert not Path(folder).parent.exists()


@pytest.mark.parametrize(
    ("adapter", "text"),
    [(NeedyAdapter("x"), "missing 1 required positional argument"), (local_adapter(), "<locals>")],
    ids=["constructor", "local-class"],
)
def test_an_adapter_that_the_child_cannot_build_is_refused_with_advice(
    adapter: ForeignAdapter, text: str
) -> None:
    with pytest.raises(
        EngineProcessError, match="cannot be built in the engine's process"
    ) as caught:
        open_with(adapter)
    assert text in str(caught.value)
    assert "at the top level of a module" in str(caught.value)


def test_settings_that_the_engine_cannot_honour_are_refused_as_they_are_here() -> None:
    with pytest.raises(UnsupportedTrialError, match=r"There is no model 'toy'\. Use another\."):
        open_with(RefusingAdapter())


# The parent's end ---------------------------------------------------------------------------------


class StuckSession(ForeignSession):
    """Says that it is stuck, and is."""

    def __init__(self, settings: EngineSettings) -> None:
        options = dict(settings.options)
        self._pipe = Path(options.pop("pipe"))
        super().__init__(
            EngineSettings(num_blocks=settings.num_blocks, options=options, block_size=4)
        )

    def poll(self, timeout_s: float) -> Sequence[AnyEvent]:
        self._pipe.write_text(f"{os.getpid()}\n")
        crash("c_loop")
        return []


class StuckAdapter(ForeignAdapter):
    """Adapter of `StuckSession`."""

    def open(self, settings: EngineSettings) -> StuckSession:
        return StuckSession(settings)


PARENT = """
import sys
from preempt_harness.adapters.child import ChildHost
from preempt_harness.adapters.protocol import EngineSettings
from tests.harness.test_child import StuckAdapter

host = ChildHost(StuckAdapter(), 600.0)
session = host.open(EngineSettings(num_blocks=4, options={"pipe": sys.argv[1]}))
session.poll(600.0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a stuck child is not reached")
def test_a_stuck_child_ends_when_its_parent_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is killed leaves its temporary files, until somebody else makes some."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR)  # so that neither side waits for the other to open it
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(SOURCE_PATHS),
        "TMPDIR": str(tmp_path),
    }
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(pipe)], cwd=ROOT, env=environment)
    try:
        assert select.select([reader], [], [], WAIT_S)[0], "the child never got stuck"
        child = os.pidfd_open(int(os.read(reader, 64)))
        parent.kill()
        assert select.select([child], [], [], WAIT_S)[0], "the child has outlived its parent"
        os.close(child)
        parent.wait()
        (left,) = tmp_path.glob("preempt-harness-engine-*/")
        folder = ChildFolder()
        assert not left.exists()
        other = ChildFolder()
        assert folder.path.exists()
        folder.remove()
        other.remove()
        assert list(tmp_path.iterdir()) == [pipe]
    finally:
        parent.kill()
        parent.wait()
        os.close(reader)
