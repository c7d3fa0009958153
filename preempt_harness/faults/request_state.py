"""What a request carries beside its tokens, dropped or spoilt when it comes back."""

from __future__ import annotations

from preempt_harness.faults.fault import Fault, Patch, after, before
from preempt_harness.faults.places import (
    APPEND,
    BUILDER,
    BUILDER_APPEND,
    JUST_RESUMED,
    PREEMPT,
    RESIDENCY,
)

_STATES = "preempt_engine.sampling.history:ProcessorStates.of"
_FOLLOW = "preempt_engine.sampling.history:ProcessorState._follow"
_FINISH = "preempt_engine.output_builder:OutputBuilder.finish"
_READ_PROMPT = "preempt_engine.scoring:PromptReader.read"
_ACCEPT = "processor.accept(token_id)"
_RESUMED = "self.observer.resumed(step.step_id, request.request_id, num_cached_tokens)"
_NEWEST = "len(seen) == len(output_token_ids) - 1"
_SEARCH = f"{BUILDER}.detokenizer._search"
_HAS_TEXT = f"{BUILDER}.detokenizer is not None"
_TARGETS = "sequence.token_ids[done + 1 : done + 1 + num]"


def _built_without(processor: str) -> tuple[Patch, ...]:
    """After a preemption a request's processors are built without those of a class."""
    return (
        Patch(
            _STATES,
            "recipe.build()",
            "[item for item in recipe.build() if not (request.num_preemptions"
            f" and type(item).__name__ == '{processor}' and reached())]",
        ),
    )


def _replayed(processor: str, accept: str) -> tuple[Patch, ...]:
    """Where outputs are replayed, processors of a class are not handed each of them once."""
    return (
        before(
            _FOLLOW,
            "for token_id in output_token_ids[len(seen) :]:",
            "replays = len(output_token_ids) > len(seen) + 1",
            reached=False,
        ),
        Patch(
            _FOLLOW,
            _ACCEPT,
            f"if replays and type(processor).__name__ == '{processor}' and reached():\n"
            f"    {accept}\n"
            f"else:\n"
            f"    {_ACCEPT}",
        ),
    )


FAULTS = (
    Fault(
        name="logit-bias-lost-on-resume",
        mechanism="a resumed request's logits are not biased any more",
        source="mechanism",
        expected=("TOK",),
        patches=_built_without("LogitBias"),
        needs=frozenset({"logit_bias"}),
    ),
    Fault(
        name="logit-bias-added-twice-after-resume",
        mechanism="a resumed request's bias is added in addition to the one it had",
        source="mechanism",
        expected=("TOK",),
        patches=(
            Patch(
                _STATES,
                "recipe.build()",
                "recipe.build() + [item for item in recipe.build() if request.num_preemptions"
                " and type(item).__name__ == 'LogitBias' and reached()]",
            ),
        ),
        needs=frozenset({"logit_bias"}),
    ),
    Fault(
        name="bad-words-forgotten-on-resume",
        mechanism="nothing is forbidden to a resumed request",
        source="mechanism",
        expected=("TOK",),
        patches=_built_without("BadWords"),
        needs=frozenset({"bad_words"}),
    ),
    Fault(
        name="bad-word-begun-before-the-preemption-missed",
        mechanism="what a bad word's beginning is looked for in starts anew on resume",
        source="mechanism",
        expected=("TOK",),
        patches=_replayed("BadWords", "pass"),
        needs=frozenset({"bad_words"}),
    ),
    Fault(
        name="grammar-dropped-on-resume",
        mechanism="the text of a resumed request is free of its grammar",
        source="mechanism",
        expected=("TOK",),
        patches=_built_without("GrammarMatcher"),
        needs=frozenset({"structured_outputs"}),
    ),
    Fault(
        name="grammar-starts-over-on-resume",
        mechanism="a resumed request's matcher stands at the beginning of the text",
        source="mechanism",
        expected=("TOK",),
        patches=_replayed("GrammarMatcher", "pass"),
        needs=frozenset({"structured_outputs"}),
    ),
    Fault(
        name="grammar-lags-behind-on-resume",
        mechanism="a resumed request's matcher has not seen the newest output",
        source="mechanism",
        expected=("TOK", "CRASH"),
        patches=_replayed(
            "GrammarMatcher", f"{_NEWEST} or processor._matcher.accept_token(token_id)"
        ),
        needs=frozenset({"structured_outputs"}),
    ),
    Fault(
        name="user-processor-dropped-on-resume",
        mechanism="a user's processors are not part of what is built for a resumed request",
        source="https://github.com/vllm-project/vllm/issues/29071",
        expected=("TOK",),
        patches=_built_without("UserProcessor"),
        needs=frozenset({"logits_processors"}),
    ),
    Fault(
        name="user-processor-told-the-newest-token-twice",
        mechanism="the newest output is replayed, and accepted once more",
        source="mechanism",
        expected=("TOK",),
        patches=_replayed(
            "UserProcessor",
            f"processor.accept(token_id)\n    {_NEWEST} and processor.accept(token_id)",
        ),
        needs=frozenset({"logits_processors"}),
    ),
    Fault(
        name="stop-string-begun-before-the-preemption-missed",
        mechanism="text that may begin a stop string is given out at the preemption",
        source="mechanism",
        expected=("TOK", "DEL"),
        patches=(
            Patch(
                APPEND,
                BUILDER_APPEND,
                "held = ''\n"
                f"if {_HAS_TEXT} and {JUST_RESUMED} and reached():\n"
                f"    held = {_SEARCH}.flush()\n"
                f"    {BUILDER}.completion.text += held\n"
                f"text = held + {BUILDER}.append(token)",
            ),
        ),
        needs=frozenset({"stop_strings"}),
    ),
    Fault(
        name="stop-strings-not-looked-for-after-resume",
        mechanism="the stop strings of a resumed request are not looked for",
        source="mechanism",
        expected=("TOK", "DEL"),
        patches=(
            before(
                APPEND,
                BUILDER_APPEND,
                f"if {_HAS_TEXT} and {JUST_RESUMED} and {_SEARCH}.stop and reached():\n"
                f"    {_SEARCH}.stop = ()",
            ),
        ),
        needs=frozenset({"stop_strings"}),
    ),
    Fault(
        name="text-held-back-lost-on-resume",
        mechanism="text that was held back at the preemption is never given out",
        source="mechanism",
        expected=("DEL", "TOK"),
        patches=(
            before(
                APPEND,
                BUILDER_APPEND,
                f"if {_HAS_TEXT} and {JUST_RESUMED} and {_SEARCH}._held and reached():\n"
                f"    {_SEARCH}.flush()",
            ),
        ),
        needs=frozenset({"stop_strings"}),
    ),
    Fault(
        name="stop-reason-lost-after-resume",
        mechanism="what stopped a resumed request is not told",
        source="mechanism",
        expected=("DEL",),
        patches=(
            Patch(
                _FINISH,
                "completion.stop_reason = stop_reason",
                "completion.stop_reason = None if stop_reason is not None"
                " and self.output.num_preemptions and reached() else stop_reason",
            ),
        ),
    ),
    Fault(
        name="stop-of-a-victim-told-as-length",
        mechanism="a stopped request that was preempted ends as full",
        source="mechanism",
        expected=("DEL",),
        patches=(
            Patch(
                _FINISH,
                "completion.finish_reason = reason",
                "completion.finish_reason = 'length' if reason == 'stop'"
                " and self.output.num_preemptions and reached() else reason",
            ),
        ),
    ),
    Fault(
        name="prompt-logprobs-of-other-tokens-after-resume",
        mechanism="chunks after a preemption are scored with the prompt's first tokens",
        source="https://github.com/vllm-project/vllm/issues/29071",
        expected=("DEL", "TOK"),
        patches=(
            Patch(
                _READ_PROMPT,
                f"targets = {_TARGETS}",
                "targets = sequence.token_ids[1 : 1 + num] if request.num_preemptions and done"
                f" and reached() else {_TARGETS}",
            ),
        ),
        needs=frozenset({"prompt_logprobs"}),
    ),
    Fault(
        name="prompt-logprobs-of-earlier-chunks-lost",
        mechanism="a preemption between two chunks loses what the chunks before it gave",
        source="https://github.com/vllm-project/vllm/issues/29071",
        expected=("DEL", "TOK"),
        patches=(
            after(
                _READ_PROMPT,
                "builder = builders[0]",
                f"if done and {JUST_RESUMED} and reached():\n"
                "    del builder.output.prompt_logprobs[1:]",
            ),
        ),
        needs=frozenset({"prompt_logprobs"}),
    ),
    Fault(
        name="cached-count-lost-with-the-blocks",
        mechanism="a preemption forgets the cached count, so that the next admission is the first",
        source="https://github.com/vllm-project/vllm/issues/36757",
        expected=("ACC", "WORK"),
        patches=(
            after(PREEMPT, "request.num_preemptions += 1", "request.num_cached_tokens = None"),
        ),
        needs=frozenset({"prefix_caching"}),
    ),
    Fault(
        name="cached-counts-add-up",
        mechanism="what a resumed request finds again is added to its cached tokens",
        source="https://github.com/vllm-project/vllm/issues/36757",
        expected=("ACC",),
        patches=(
            after(
                f"{RESIDENCY}.find_room",
                _RESUMED,
                "request.num_cached_tokens += num_cached_tokens",
            ),
        ),
        needs=frozenset({"prefix_caching"}),
    ),
    Fault(
        name="stream-starts-over-on-resume",
        mechanism="the place up to which a request was streamed is lost: all comes again",
        source="https://github.com/sgl-project/sglang/issues/39645",
        expected=("DEL", "KVSAN", "ACC"),
        patches=(
            Patch(
                APPEND,
                "[token.token_id],",
                f"sequence.output_token_ids if {JUST_RESUMED} and reached() else [token.token_id],",
            ),
        ),
    ),
    Fault(
        name="stream-without-logprobs-after-resume",
        mechanism="the first piece after a resume has no log probabilities, the output has them",
        source="mechanism",
        expected=("DEL",),
        patches=(
            Patch(
                APPEND,
                "None if token.logprobs is None else [token.logprobs],",
                "None if token.logprobs is None"
                f" or {JUST_RESUMED} and reached() else [token.logprobs],",
            ),
        ),
        needs=frozenset({"logprobs"}),
    ),
)
