"""Reports: what a user is told beside the tokens, sums, alternatives, rows of the prompt, noise."""

from __future__ import annotations

from preempt_harness.faults.fault import Fault, Patch, after, before
from preempt_harness.faults.places import APPEND, BUILDER, BUILDER_APPEND, DELIVERY

_FIRST_AFTER_RETURN = (
    "request.num_preemptions and sequence.num_tokens == sequence.num_prefill_tokens + 1"
)

FAULTS = (
    Fault(
        name="cumulative-logprob-restarts",
        mechanism="the sum of log probabilities begins again at the first token after a return",
        source="mechanism",
        expected=("DEL-LOGPROBS",),
        patches=(
            before(
                APPEND,
                BUILDER_APPEND,
                f"whole = {BUILDER}.completion\n"
                f"is_first = {_FIRST_AFTER_RETURN}\n"
                "if is_first and whole.cumulative_logprob is not None and reached():\n"
                "    whole.cumulative_logprob = 0.0",
            ),
        ),
        needs=frozenset({"logprobs"}),
    ),
    Fault(
        name="alternatives-of-the-first-token-lost",
        mechanism="the first token after a return comes with its own log probability alone",
        source="mechanism",
        expected=("TOK-LOGPROBS",),
        patches=(
            before(
                APPEND,
                BUILDER_APPEND,
                f"is_first = {_FIRST_AFTER_RETURN}\n"
                "if is_first and len(token.logprobs or ()) > 1 and reached():\n"
                "    token.logprobs = {token.token_id: token.logprobs[token.token_id]}",
            ),
        ),
        needs=frozenset({"logprobs"}),
    ),
    Fault(
        name="stream-of-a-victim-begins-again",
        mechanism="a reader of deltas is told everything once more after a preemption",
        source="https://github.com/sgl-project/sglang/issues/39645",
        expected=("DEL",),
        patches=(
            after(
                "preempt_engine.stream:DeltaReader._delta",
                "told = self._told.get(branch.index, (0, 0))",
                'known = getattr(self, "_num_preemptions", 0)\n'
                "if told is not None and self._output.num_preemptions > known and reached():\n"
                "    self._num_preemptions = self._output.num_preemptions\n"
                "    told = (0, 0)",
            ),
        ),
    ),
    Fault(
        name="hits-cover-rows-of-the-prompt-that-are-due",
        mechanism="a returning request takes hits for tokens whose log probabilities are due",
        source="mechanism",
        expected=("DEL", "CRASH"),
        patches=(
            Patch(
                "preempt_engine.admission:place",
                "hits = blocks.find_prefix(sequence, max_tokens=sequence.first_wanted_logits)",
                "most = sequence.first_wanted_logits\n"
                "if request.num_preemptions and most < sequence.num_tokens - 1 and reached():\n"
                "    most = sequence.num_tokens - 1\n"
                "hits = blocks.find_prefix(sequence, max_tokens=most)",
            ),
        ),
        needs=frozenset({"prompt_logprobs", "prefix_caching", "chunked_prefill"}),
    ),
    Fault(
        name="cached-tokens-of-the-luckiest-admission",
        mechanism="a request's cached tokens are the most of any admission, not the first one's",
        source="https://github.com/vllm-project/vllm/issues/36757",
        expected=("ACC",),
        patches=(
            after(
                "preempt_engine.residency:Residency.find_room",
                "num_cached_tokens = len(placements[0].hits) * self.config.block_size",
                "if num_cached_tokens > (request.num_cached_tokens or 0):\n"
                "    if request.num_cached_tokens is not None and reached():\n"
                "        request.num_cached_tokens = num_cached_tokens",
            ),
        ),
        needs=frozenset({"prefix_caching"}),
    ),
    Fault(
        name="noise-of-later-branches-shifts",
        mechanism="branches but the first are given new seeds with every preemption",
        source="mechanism",
        expected=("TOK",),
        patches=(
            Patch(
                f"{DELIVERY}._sample_request",
                "seed=request.seed,",
                "seed=request.seed\n"
                "+ (request.num_preemptions if branch and request.num_preemptions and reached() "
                "else 0),",
            ),
        ),
        needs=frozenset({"parallel_sampling", "sampling"}),
    ),
    Fault(
        name="live-branches-numbered-anew",
        mechanism="after a preemption a branch's noise is keyed by its place among the live ones",
        source="mechanism",
        expected=("TOK",),
        patches=(
            Patch(
                f"{DELIVERY}._sample_request",
                "branch=branch,",
                "branch=(\n"
                "    branch\n"
                "    if not request.num_preemptions\n"
                "    or sorted(request.sequences).index(branch) == branch\n"
                "    or not reached()\n"
                "    else sorted(request.sequences).index(branch)\n"
                "),",
            ),
        ),
        needs=frozenset({"parallel_sampling", "sampling"}),
    ),
)
