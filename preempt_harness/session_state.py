"""What one pytest session keeps: the selection, the adapters, baselines and summaries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from preempt_harness import replay
from preempt_harness.adapters import protocol
from preempt_harness.adapters.child import ChildHost
from preempt_harness.adapters.protocol import (
    EngineAdapter,
    EngineSettings,
    KeepsEngines,
    Session,
)
from preempt_harness.adapters.registry import AdapterError, AdapterRegistry
from preempt_harness.baseline import BaselineStore
from preempt_harness.collector import PROPERTY
from preempt_harness.explore.from_tests import FAILURES, Exploration
from preempt_harness.harness import PreemptHarness
from preempt_harness.options import Selection
from preempt_harness.result import TrialResult
from preempt_harness.trial import Trial

_STATE = pytest.StashKey["SessionState"]()


def close_session_state(config: pytest.Config) -> None:
    """End what the session's state started, if a test ever needed it."""
    state = config.stash.get(_STATE, None)
    if state is not None:
        state.close()


def session_state(config: pytest.Config) -> SessionState:
    """The state of the session; made when a test first needs it."""
    state = config.stash.get(_STATE, None)
    if state is None:
        state = config.stash[_STATE] = SessionState(config)
    return state


class SessionState:
    """See the module's docstring.

    Args:
        config: of the pytest session.

    Raises:
        pytest.UsageError: an option or a registered adapter is wrong.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.selection = Selection.from_config(config)
        added = config.hook.pytest_preempt_adapters(config=config)
        try:
            self.registry = AdapterRegistry(item for group in added for item in group)
        except AdapterError as error:
            raise pytest.UsageError(str(error)) from error
        self._adapters: dict[str, EngineAdapter] = {}
        self._stores: dict[str, BaselineStore] = {}
        self._hosts: dict[str, ChildHost] = {}

    def adapter(self, wanted: str | None = None) -> EngineAdapter:
        """The adapter of that name, else the selected one, else the default.

        Raises:
            pytest.UsageError: it is unknown, ambiguous, or something it needs is not installed.
        """
        try:
            name = wanted or self.selection.engine or self.registry.default_name()
            if name not in self._adapters:
                self._adapters[name] = self.registry.get(name)
        except AdapterError as error:
            raise pytest.UsageError(str(error)) from error
        missing = self._adapters[name].missing()
        if missing:
            raise pytest.UsageError(f"Engine {name!r} cannot be used here: {missing}")
        return self._adapters[name]

    def check_selection(self) -> None:
        """Refuse what the user asked for and cannot have, before any test runs.

        Raises:
            pytest.UsageError: the engine is unknown or cannot be used, options contradict, or the
                replay string is damaged.
        """
        adapter = self.adapter()
        replayed = self._replayed()
        if replayed is not None and self.selection.engine not in ("", replayed.engine):
            raise pytest.UsageError(
                f"--preempt-engine={self.selection.engine} contradicts --preempt-replay, which is "
                f"a trial of engine {replayed.engine!r}: leave one out."
            )
        if self.selection.tp > 1 and protocol.TENSOR_PARALLEL not in adapter.capabilities:
            raise pytest.UsageError(
                f"--preempt-tp={self.selection.tp}: engine {adapter.name!r} has no tensor "
                f"parallelism. Use --preempt-tp=1."
            )

    def header(self) -> str:
        """Engine and options, for the head of the terminal output."""
        selection = self.selection
        name = selection.engine or self.registry.default_name()
        model = selection.model or self.adapter(name).models[0]
        return (
            f"preempt_harness: engine {name}, model {model}, tp {selection.tp}, "
            f"seed {selection.seed}"
        )

    def harness(
        self,
        adapter: EngineAdapter,
        values: Mapping[str, Any],
        test: str,
        explored: Mapping[str, Any] | None = None,
    ) -> PreemptHarness:
        """The object behind the `preempt` fixture of one test.

        Args:
            adapter: the engine.
            values: of the test's `preempt` markers.
            test: node id.
            explored: of its `preempt_explore` markers.
        """
        selection = self.selection
        defaults = {
            "model": selection.model or adapter.models[0],
            "tensor_parallel_size": selection.tp,
            "seed": selection.seed,
            **{name: value for name, value in values.items() if name != "engine"},
        }
        opener = self._opener(adapter)
        harness = PreemptHarness(
            adapter,
            defaults,
            seed=selection.seed,
            open_session=opener,
            baselines=self._stores.get(adapter.name),
            replayed=self._replayed(),
            poll_timeout_s=selection.poll_timeout_s,
            test=test,
            exploration=Exploration(
                examples=selection.examples or None,
                time_s=selection.time_s or None,
                directory=self._config.rootpath / FAILURES,
            ).with_values(explored or {}),
        )
        self._stores.setdefault(adapter.name, harness.baselines)
        return harness

    def finish_trial(self, node: pytest.Item, result: TrialResult) -> None:
        """Attach the trial's summary to the test's report, and tell other plugins."""
        summary = result.summary()
        node.user_properties.append((PROPERTY, summary.to_json()))
        for name in ("engine", "model", "verdict", "replay"):
            node.user_properties.append((f"preempt_{name}", getattr(summary, name)))
        node.user_properties.append(("preempt_preemptions", len(summary.preemptions)))
        self._config.hook.pytest_preempt_trial_finished(config=self._config, result=result)

    def host_pids(self) -> frozenset[int]:
        """Engine processes that outlive a test on purpose."""
        hosts = frozenset(host.pid for host in self._hosts.values() if host.pid is not None)
        return hosts.union(*(keeper.kept_process_ids() for keeper in self._keepers()))

    def close(self) -> None:
        """End every engine process."""
        for host in self._hosts.values():
            host.close()
        for keeper in self._keepers():
            keeper.close_kept()

    def _keepers(self) -> list[KeepsEngines]:
        return [a for a in self._adapters.values() if isinstance(a, KeepsEngines)]

    def _replayed(self) -> Trial | None:
        if not self.selection.replay:
            return None
        try:
            return replay.decode(self.selection.replay)
        except replay.ReplayError as error:
            raise pytest.UsageError(f"--preempt-replay: {error}") from error

    def _opener(self, adapter: EngineAdapter) -> Callable[[EngineSettings], Session] | None:
        isolation = self.selection.isolation or adapter.isolation
        if isolation == "none":
            return None
        if adapter.name not in self._hosts:
            self._hosts[adapter.name] = ChildHost(adapter, self.selection.poll_timeout_s)
        return self._hosts[adapter.name].open
