"""Delivery: what reaches the user of a request that was preempted."""

from __future__ import annotations

from preempt_harness.faults.fault import Fault, Patch, after, before
from preempt_harness.faults.places import APPEND, BUILDER_APPEND, JUST_RESUMED

_COMPLETION = "self._builders[request.request_id][sequence.key.branch].completion"

FAULTS = (
    Fault(
        name="logprobs-missing-after-resume",
        mechanism="the first token after a resume comes without log probabilities",
        source="sglang, test of logprobs under retraction",
        expected=("DEL",),
        patches=(
            before(
                APPEND,
                "self.scheduler.append_token(sequence, token.token_id)",
                f"if token.logprobs is not None and {JUST_RESUMED} and reached():\n"
                "    token = type(token)(token.token_id, None)",
            ),
        ),
    ),
    Fault(
        name="logprobs-doubled-after-resume",
        mechanism="the log probabilities of the first token after a resume are recorded twice",
        source="mechanism",
        expected=("DEL",),
        patches=(
            after(
                APPEND,
                BUILDER_APPEND,
                f"logprobs = {_COMPLETION}.logprobs\n"
                f"if logprobs and {JUST_RESUMED} and reached():\n"
                "    logprobs.append(logprobs[-1])",
            ),
        ),
    ),
    Fault(
        name="token-delivered-again-after-resume",
        mechanism="the first token after a resume is delivered twice",
        source="mechanism",
        expected=("DEL", "TOK"),
        patches=(
            before(
                APPEND,
                BUILDER_APPEND,
                f"if {JUST_RESUMED} and reached():\n"
                f"    {_COMPLETION}.token_ids.append(token.token_id)",
            ),
        ),
    ),
    Fault(
        name="stream-misses-the-first-token-after-resume",
        mechanism="the stream skips the first token after a resume, the final output has it",
        source="mechanism",
        expected=("DEL", "ACC"),
        patches=(
            Patch(
                APPEND,
                "if self.scheduler.observer is not None:",
                f"if self.scheduler.observer is not None and not ({JUST_RESUMED} and reached()):",
            ),
        ),
    ),
    Fault(
        name="text-lost-after-resume",
        mechanism="the text of the first token after a resume is not streamed",
        source="mechanism",
        expected=("DEL",),
        patches=(
            after(APPEND, BUILDER_APPEND, f"text = '' if {JUST_RESUMED} and reached() else text"),
        ),
    ),
    Fault(
        name="finish-reason-of-a-victim",
        mechanism="a request that was preempted ends as stopped, not as full",
        source="mechanism",
        expected=("DEL",),
        patches=(
            Patch(
                "preempt_engine.output_builder:OutputBuilder.append",
                'self.finish("length", None)',
                'self.finish("stop" if self.output.num_preemptions and reached()'
                ' else "length", None)',
            ),
        ),
    ),
    Fault(
        name="abort-loses-what-was-delivered",
        mechanism="a preempted request that is aborted gives back no tokens",
        source="mechanism",
        expected=("DEL",),
        patches=(
            after(
                "preempt_engine.delivery:Delivery.abort",
                'self._finish_branches(self.scheduler.next_step_id, builders, "abort")',
                "if request.num_preemptions and reached():\n"
                "    builders[0].completion.token_ids.clear()",
            ),
        ),
    ),
    Fault(
        name="neighbours-token-after-a-preemption",
        mechanism="in the step after a preemption two requests get each other's token",
        source="mechanism",
        expected=("TOK", "KVSAN"),
        patches=(
            after(
                "preempt_engine.delivery:Delivery._choose_tokens",
                "tokens = sample(logits, [sample_request for _, _, sample_request in wanted])",
                "if len(tokens) > 1 and any(request.num_preemptions and"
                " sequence.num_steps_since_admission == 1 and reached() for request,"
                " sequence, _ in wanted):\n"
                "    tokens = tokens[::-1]",
            ),
        ),
    ),
)
