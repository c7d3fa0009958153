"""Known issues are strict expected failures: the code must show; a fixed engine shows at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plugin.conftest import RunPytest

CONFTEST = """
from preempt_harness.adapters.embedded import EmbeddedAdapter
from preempt_harness.adapters.protocol import KnownIssue

class Faulty(EmbeddedAdapter):
    name = "faulty"
    known_issues = (
        KnownIssue(code={code!r}, scenario="test_it[*", versions="all", link="docs/x.md"),
    )

    def open(self, settings):
        session = super().open(settings)
        if {broken}:
            session._observer.finished = lambda *a: None   # the record lacks the ends
            real = session.results
            session.results = lambda: {{
                name: result for name, result in real().items() if name != "r0"
            }}
        return session

def pytest_preempt_adapters(config):
    return [Faulty()]
"""

TEST = """
import pytest

@pytest.mark.parametrize("size", [4])
def test_it(preempt, size):
    result = preempt.run(
        preempt.workload(requests=2, max_tokens=8), plan="preempt:r0@out=2", block_size=size
    )
    result.assert_clean()
"""


@pytest.mark.parametrize(
    ("broken", "code", "expected"),
    [
        (True, "DEL-NO-RESULT", "1 xfailed"),
        (True, "KVSAN-LEAK", "1 failed"),
        (False, "DEL-NO-RESULT", "1 failed"),
    ],
    ids=["shown", "another-finding", "fixed"],
)
def test_a_known_issue(
    run_pytest: RunPytest, tmp_path: Path, broken: bool, code: str, expected: str
) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST.format(broken=broken, code=code))
    (tmp_path / "test_it.py").write_text(TEST)
    completed = run_pytest("-p", "preempt_harness", "-rx")
    assert expected in completed.stdout.splitlines()[-1], completed.stdout + completed.stderr
    if not broken:
        assert "XPASS(strict)" in completed.stdout
