"""The plugin's hooks. Inert until a fixture, a marker or a --preempt-* option asks for something.

Only light imports at the top: `pytest --help` must load neither torch nor msgspec.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from typing import Any

import pytest

from preempt_harness.collector import TrialCollector
from preempt_harness.options import Selection, add_options


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Hooks that others may implement."""
    from preempt_harness import hookspecs

    pluginmanager.add_hookspecs(hookspecs)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options and their ini twins."""
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Markers, and the collector of what trials leave in test reports."""
    for line in _MARKER_LINES:
        config.addinivalue_line("markers", line)
    config.pluginmanager.register(TrialCollector(config), "preempt_harness_collector")
    selection = Selection.from_config(config)
    if selection.devices:
        from preempt_harness import device_workers

        device_workers.configure(config, selection)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """With --preempt-devices, `-n auto` is one worker for each set of GPUs."""
    selection = Selection.from_config(config)
    if not selection.devices:
        return None
    from preempt_harness import device_workers

    return device_workers.num_workers(config, selection)


_MARKER_LINES = (
    "preempt(engine=, model=, **settings): engine and settings of this test's trials",
    "preempt_requires(*capabilities): skip where the engine lacks one of them",
    "preempt_explore(strategy=, examples=, time_s=): what preempt.explore() does in this test",
    "preempt_matrix(**values): run the test for every combination of the listed values of axes "
    "(model, tp, dtype, backend, mode, block_size) and settings",
)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Refuse wrong options before anything is collected, on the controller only."""
    config = session.config
    selection = Selection.from_config(config)
    if not selection.asked_for or hasattr(config, "workerinput"):
        return
    from preempt_harness.session_state import session_state

    session_state(config).check_selection()


def pytest_unconfigure(config: pytest.Config) -> None:
    """End engine processes; nothing is loaded if no test needed any."""
    if "preempt_harness.session_state" in sys.modules:
        from preempt_harness.session_state import close_session_state

        close_session_state(config)
    if "preempt_harness.device_workers" in sys.modules:
        from preempt_harness import device_workers

        device_workers.unconfigure(config)


def pytest_report_header(config: pytest.Config) -> str | None:
    """One line, when an option of this plugin was given."""
    selection = Selection.from_config(config)
    if not selection.asked_for:
        return None
    from preempt_harness.session_state import session_state

    return session_state(config).header()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`preempt_matrix`, the marker and the ini key."""
    marked = metafunc.definition.get_closest_marker("preempt_matrix") is not None
    if marked or metafunc.config.getini("preempt_matrix"):
        from preempt_harness.marks import parametrize_matrix

        parametrize_matrix(metafunc)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """`preempt_requires`, and the preemption mode of a matrix's cell."""
    in_matrix = "preempt_matrix_values" in getattr(item, "fixturenames", ())
    if item.get_closest_marker("preempt_requires") is None and not in_matrix:
        return
    from preempt_harness.marks import matrix_cell, preempt_values, required_capabilities
    from preempt_harness.session_state import session_state

    needed = required_capabilities(item)
    cell = matrix_cell(item)
    if cell is not None and "mode" in cell.values:
        needed |= {cell.values["mode"]}
    adapter = session_state(item.config).adapter(preempt_values(item).get("engine"))
    lacking = sorted(needed - adapter.capabilities)
    if lacking:
        pytest.skip(f"engine {adapter.name} lacks {', '.join(lacking)}")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    """A trial that the engine cannot run skips its test, with the reason."""
    try:
        return (yield)
    except Exception as error:
        # By name, so that tests without trials load nothing of the harness.
        if type(error).__name__ == "UnsupportedTrialError":
            pytest.skip(str(error))
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remember how the call went, for fixtures that judge at the end."""
    report = yield
    if "preempt" in getattr(item, "fixturenames", ()) and report.when == "call":
        from preempt_harness.marks import CALL_REPORT

        item.stash[CALL_REPORT] = report
        _expect_known_issue(item, report)
    return report


def _expect_known_issue(item: pytest.Item, report: pytest.TestReport) -> None:
    from preempt_harness import known_issues
    from preempt_harness.marks import preempt_values
    from preempt_harness.session_state import session_state

    adapter = session_state(item.config).adapter(preempt_values(item).get("engine"))
    issue = known_issues.issue_of(adapter, item.name)
    if issue is not None:
        known_issues.apply(issue, report)


def pytest_assertrepr_compare(
    config: pytest.Config, op: str, left: object, right: object
) -> list[str] | None:
    """Where two lists of token ids first differ."""
    from preempt_harness.report import explain_token_difference

    return explain_token_difference(op, left, right)
