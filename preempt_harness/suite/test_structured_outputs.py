"""A grammar's matcher stands where the output ends, also when its request has come back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from preempt_harness.harness import PreemptHarness
from preempt_harness.suite.shapes import (
    block_size,
    chunks,
    companions,
    request,
    require_mode,
    together,
)

pytestmark = pytest.mark.preempt_requires("structured_outputs", "preempt", "stepped")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "enum": ["left", "right"]},
        "ok": {"type": "boolean"},
        "count": {"enum": [10, 200, 3000]},
    },
    "required": ["name", "ok", "count"],
    "additionalProperties": False,
}
GRAMMARS: dict[str, dict[str, Any]] = {
    "regex": {"regex": "(AB|CD|EFG){6,9}[0-9]{3}"},
    "json": {"json_schema": json.dumps(SCHEMA)},
}
_WITH_BRACES = 128  # ids of the exact model, one for each character


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("at", ["chunk=1", "out=1", "out=6"], ids=["prefill", "first", "decode"])
@pytest.mark.parametrize("grammar", GRAMMARS)
def test_structured_output(preempt: PreemptHarness, grammar: str, at: str, mode: str) -> None:
    require_mode(preempt, mode)
    block = block_size(preempt)
    workload = together(
        companions(preempt, block, count=1),
        request(preempt, "victim", 4 * block, 60, ignore_eos=False, **GRAMMARS[grammar]),
    )
    exact = preempt.settings().model == "exact"
    result = preempt.run(
        workload,
        plan=f"preempt:victim@{at}:{mode}/preempt:victim@out=9:{mode}",
        block_size=block,
        options={"exact_vocab_size": _WITH_BRACES} if exact else {},
        **chunks(preempt, 2 * block),
    )
    result.assert_preempted(request="victim", mode=mode)
    result.assert_matches_baseline()
    result.assert_clean()
