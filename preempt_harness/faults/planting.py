"""Plants a fault in other processes: in a pytest session, and in the workers of an engine.

As a pytest plugin (`-p preempt_harness.faults.planting --preempt-plant-fault NAME`) it plants the
fault for the whole session, in this process and in every rank that the embedded engine starts.
`--preempt-plant-report FILE` receives, as JSON, what became of the session: see `PlantReport`.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

if TYPE_CHECKING:
    from preempt_harness.adapters.protocol import EngineSettings, Session
    from preempt_harness.faults.fault import Fault
    from preempt_harness.result import TrialResult

_LONGEST_MESSAGE = 300  # characters
_PLANTED: list[object] = []  # contexts of faults that stay in this process


class PlantReport(msgspec.Struct, kw_only=True):
    """What a pytest session with a fault, or without one, came to.

    Attributes:
        reached: how often a faulty line ran.
        num_tests: test calls that passed or failed.
        num_failed: of those.
        num_trials: trials of the `preempt` fixture.
        first_failure: node id of the first test that failed, "" if none did.
        message: the last line of its error.
        codes: finding codes of its trials.
        cpu_s: processor seconds up to its end, or the session's.
    """

    reached: int = 0
    num_tests: int = 0
    num_failed: int = 0
    num_trials: int = 0
    first_failure: str = ""
    message: str = ""
    codes: list[str] = []
    cpu_s: float = 0.0


def plant_in_worker(runner: object, argument: str) -> None:
    """A worker hook: this process has the fault from now on.

    Args:
        runner: of the rank; it is not used.
        argument: name of the fault, a colon, and a folder in which a file tells that it was
            reached.
    """
    from preempt_harness.faults.catalogue import fault_named
    from preempt_harness.faults.patching import plant

    name, _, folder = argument.partition(":")
    mark = Path(folder) / str(os.getpid())
    context = plant(fault_named(name), on_first=mark.touch)
    context.__enter__()
    _PLANTED.append(context)  # one that nobody holds would be left at once


@contextmanager
def planted_everywhere(fault: Fault) -> Iterator[Callable[[], int]]:
    """Plant a fault here, and in the ranks of every embedded engine that is opened meanwhile.

    Yields:
        Tells how often it was reached; a rank that reached it counts once.

    Raises:
        FaultTargetError: the code that the fault replaces has changed.
    """
    from preempt_harness.adapters.embedded import EmbeddedAdapter
    from preempt_harness.faults.patching import plant

    opened = EmbeddedAdapter.open
    with (
        tempfile.TemporaryDirectory(prefix="preempt-fault-") as folder,
        plant(fault) as planted,
    ):

        def open_with_fault(adapter: EmbeddedAdapter, settings: EngineSettings) -> Session:
            # Ranks in this process have the fault already.
            inline = settings.options.get("worker_processes") is False
            if settings.tensor_parallel_size > 1 and not inline:
                hook = f"{__name__}:{plant_in_worker.__name__}:{fault.name}:{folder}"
                options = {**settings.options, "worker_hooks": (hook,)}
                settings = msgspec.structs.replace(settings, options=options)
            return opened(adapter, settings)

        EmbeddedAdapter.open = open_with_fault  # type: ignore[method-assign,assignment]
        try:
            yield lambda: planted.num_reached + len(list(Path(folder).iterdir()))
        finally:
            EmbeddedAdapter.open = opened  # type: ignore[method-assign]


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of this plugin."""
    group = parser.getgroup("preempt_harness.faults")
    group.addoption("--preempt-plant-fault", default="", metavar="NAME")
    group.addoption("--preempt-plant-report", type=Path, metavar="FILE")


def pytest_configure(config: pytest.Config) -> None:
    """Plant it."""
    config.pluginmanager.register(_Planting(config), "preempt_harness_planting")


class _Planting:
    """A session's fault and its report."""

    def __init__(self, config: pytest.Config) -> None:
        self._report = PlantReport()
        self._path: Path | None = config.getoption("preempt_plant_report")
        self._stack = ExitStack()
        self._num_reached: Callable[[], int] = lambda: 0
        self._codes: list[str] = []
        self._started = time.process_time()
        name = config.getoption("preempt_plant_fault")
        if name:
            from preempt_harness.faults.catalogue import fault_named

            planted = planted_everywhere(fault_named(name))
            self._num_reached = self._stack.enter_context(planted)

    def pytest_preempt_trial_finished(self, result: TrialResult) -> None:
        self._report.num_trials += 1
        self._codes += [str(finding.code) for finding in result.findings]

    def pytest_runtest_logstart(self) -> None:
        self._codes = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and not report.skipped:
            self._report.num_tests += 1
        if not report.failed:
            return
        self._report.num_failed += 1
        if not self._report.first_failure:
            self._report.first_failure = report.nodeid
            self._report.message = _message(report)
            self._report.cpu_s = time.process_time() - self._started

    def pytest_runtest_logfinish(self) -> None:
        if self._report.first_failure and not self._report.codes:
            self._report.codes = list(dict.fromkeys(self._codes))

    def pytest_unconfigure(self) -> None:
        self._report.reached = self._num_reached()
        self._stack.close()
        if not self._report.first_failure:
            self._report.cpu_s = time.process_time() - self._started
        if self._path is not None:
            self._path.write_bytes(msgspec.json.encode(self._report))


def _message(report: pytest.TestReport) -> str:
    crash: Any = getattr(report.longrepr, "reprcrash", None)
    text = str(crash.message if crash is not None else report.longrepr)
    return text.strip()[:_LONGEST_MESSAGE]
