"""Hooks that a conftest or another plugin may implement."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from preempt_harness.adapters.protocol import EngineAdapter
    from preempt_harness.result import TrialResult


@pytest.hookspec
def pytest_preempt_adapters(config: pytest.Config) -> Iterable[EngineAdapter]:  # type: ignore[empty-body]
    """Adapters for engines of your own.

    Called once, when the first test needs an adapter. Each implementation returns an iterable of
    objects that satisfy `preempt_harness.adapters.protocol.EngineAdapter`.
    """


@pytest.hookspec
def pytest_preempt_trial_finished(config: pytest.Config, result: TrialResult) -> None:
    """A trial ended and was judged; it may be stored or reported elsewhere."""
