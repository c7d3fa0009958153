"""From tokens to text: the same mistake in every run, which only another decoder can tell."""

from __future__ import annotations

from preempt_harness.faults.fault import Fault, Patch

_DETOKENIZER = "preempt_engine.detokenizer"
_SEARCH = f"{_DETOKENIZER}:StopStringSearch"
_STOPS = frozenset({"stop_strings", "text"})

FAULTS = (
    Fault(
        name="held-text-lost-at-the-end",
        mechanism="text that might have become a stop string is forgotten when the output is full",
        source="mechanism",
        expected=("DEL",),
        patches=(
            Patch(
                f"{_DETOKENIZER}:IncrementalDetokenizer.finish",
                "held = self._search.flush()",
                "held = self._search.flush()\nif held and reached():\n    held = ''",
            ),
        ),
        needs=_STOPS,
    ),
    Fault(
        name="stop-string-counts-at-min-tokens",
        mechanism="the last of the first min_tokens tokens may already complete a stop string",
        source="mechanism",
        expected=("DEL",),
        patches=(
            Patch(
                f"{_DETOKENIZER}:IncrementalDetokenizer._append",
                "may_stop=self.num_tokens > self.min_tokens",
                "may_stop=self.num_tokens > self.min_tokens"
                " or (self.num_tokens == self.min_tokens and reached())",
            ),
        ),
        needs=_STOPS | {"min_tokens"},
    ),
    Fault(
        name="stop-string-in-pieces-missed",
        mechanism="a stop string is looked for in the newest text only, not in what was held back",
        source="mechanism",
        expected=("DEL",),
        patches=(
            Patch(
                f"{_SEARCH}.push",
                "start = self._find(text, len(self._held)) if may_stop else None",
                "start = self._find(new_text, 0) if may_stop else None\n"
                "if self._held and start is None and reached():\n"
                "    self._held = ''",
            ),
        ),
        needs=_STOPS,
    ),
    Fault(
        name="shortest-of-the-stop-strings",
        mechanism="of stop strings that end together the shortest is taken, not the longest",
        source="mechanism",
        expected=("DEL",),
        patches=(
            Patch(
                f"{_SEARCH}._find",
                "(start + len(stop), start) < first",
                "reached() and (start + len(stop), -start) < (first[0], -first[1])",
            ),
        ),
        needs=_STOPS,
    ),
)
