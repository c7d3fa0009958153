"""The state of sampling: seeds, positions, limits and stops across a preemption."""

from __future__ import annotations

from preempt_harness.faults.fault import Fault, Patch, after, before

_SAMPLE_REQUEST = "preempt_engine.delivery:Delivery._sample_request"
_BUILDER = "preempt_engine.output_builder:OutputBuilder"

FAULTS = (
    Fault(
        name="noise-restarts-with-the-prefill",
        mechanism="the generator is made anew on every prefill, so the noise starts over",
        source="https://github.com/vllm-project/vllm/issues/19940",
        expected=("TOK",),
        patches=(
            Patch(
                _SAMPLE_REQUEST,
                "position=sequence.num_tokens",
                "position=sequence.num_tokens - sequence.num_prefill_tokens",
            ),
        ),
    ),
    Fault(
        name="seed-changes-with-the-preemption",
        mechanism="a request is given a new seed when it resumes",
        source="mechanism",
        expected=("TOK",),
        patches=(
            Patch(
                _SAMPLE_REQUEST,
                "seed=request.seed",
                "seed=request.seed + (request.num_preemptions and reached()"
                " and request.num_preemptions)",
            ),
        ),
    ),
    Fault(
        name="noise-depends-on-the-row",
        mechanism="noise is drawn by a token's row in the batch",
        source="mechanism",
        expected=("TOK",),
        patches=(Patch(_SAMPLE_REQUEST, "seed=request.seed", "seed=request.seed + row"),),
    ),
    Fault(
        name="positions-end-with-the-prompt",
        mechanism="a resumed request is given positions of its prompt only",
        source="https://github.com/sgl-project/sglang/issues/13700",
        expected=("TOK",),
        patches=(
            Patch(
                _SAMPLE_REQUEST,
                "position=sequence.num_tokens",
                "position=sequence.num_prompt_tokens if request.num_preemptions and reached()"
                " and sequence.num_steps_since_admission <= 1 else sequence.num_tokens",
            ),
        ),
    ),
    Fault(
        name="temperature-lost-on-resume",
        mechanism="a resumed request is decoded greedily",
        source="mechanism",
        expected=("TOK",),
        patches=(
            Patch(
                _SAMPLE_REQUEST,
                "params=builder.params",
                "params=__import__('dataclasses').replace(builder.params, temperature=0.0)"
                " if request.num_preemptions and reached() else builder.params",
            ),
        ),
    ),
    Fault(
        name="filters-lost-on-resume",
        mechanism="top-k, top-p and min-p of a request are lost when it resumes",
        source="mechanism",
        expected=("TOK",),
        patches=(
            Patch(
                _SAMPLE_REQUEST,
                "params=builder.params",
                "params=__import__('dataclasses').replace(builder.params, top_k=0, top_p=1.0,"
                " min_p=0.0) if request.num_preemptions and reached() else builder.params",
            ),
        ),
    ),
    Fault(
        name="min-tokens-starts-over",
        mechanism="min_tokens is counted from the last admission",
        source="mechanism",
        expected=("TOK",),
        patches=(
            Patch(
                _SAMPLE_REQUEST,
                "num_output_tokens=sequence.num_output_tokens",
                "num_output_tokens=sequence.num_tokens - sequence.num_prefill_tokens",
            ),
        ),
    ),
    Fault(
        name="min-tokens-forgotten-on-resume",
        mechanism="min_tokens does not hold for a resumed request",
        source="mechanism",
        expected=("TOK", "DEL"),
        patches=(
            Patch(
                _SAMPLE_REQUEST,
                "num_output_tokens=sequence.num_output_tokens",
                "num_output_tokens=sequence.num_output_tokens"
                " + 1000 * (request.num_preemptions > 0 and reached())",
            ),
        ),
    ),
    Fault(
        name="max-tokens-grows-with-preemptions",
        mechanism="the limit of output tokens is one too high after a preemption",
        source="https://github.com/vllm-project/vllm/issues/49860",
        expected=("DEL", "TOK"),
        patches=(
            Patch(
                f"{_BUILDER}.append",
                ">= self.max_output_tokens",
                ">= self.max_output_tokens + (self.output.num_preemptions > 0 and reached())",
            ),
        ),
    ),
    Fault(
        name="max-tokens-counts-the-recomputed",
        mechanism="a resumed request ends one token early",
        source="mechanism",
        expected=("DEL", "TOK"),
        patches=(
            Patch(
                f"{_BUILDER}.append",
                ">= self.max_output_tokens",
                ">= self.max_output_tokens - (self.output.num_preemptions > 0 and reached())",
            ),
        ),
    ),
    Fault(
        name="stop-token-ignored-after-resume",
        mechanism="stop tokens of a resumed request are not looked for",
        source="mechanism",
        expected=("TOK",),
        patches=(
            Patch(
                f"{_BUILDER}.append",
                "if token.token_id in self.stop_ids:",
                "if token.token_id in self.stop_ids"
                " and not (self.output.num_preemptions and reached()):",
            ),
        ),
    ),
    Fault(
        name="penalties-forget-the-outputs",
        mechanism="after a recompute penalties see what was generated since, not all outputs",
        source="https://github.com/vllm-project/vllm/issues/5349",
        expected=("TOK",),
        patches=(
            after(
                "preempt_engine.delivery:Delivery._attach_states",
                "sample_request.output_token_ids = sequence.output_token_ids",
                "if sequence.num_prefill_tokens > sequence.num_prompt_tokens and reached():\n"
                "    sample_request.output_token_ids ="
                " sequence.token_ids[sequence.num_prefill_tokens :]",
            ),
        ),
        needs=frozenset({"penalties"}),
    ),
    Fault(
        name="penalties-take-outputs-for-prompt",
        mechanism="after a recompute the outputs are part of the prompt for penalties",
        source="mechanism",
        expected=("TOK",),
        patches=(
            Patch(
                "preempt_engine.sampling.history:ProcessorStates.of",
                "sequence.token_ids[: sequence.num_prompt_tokens]",
                "sequence.token_ids[: sequence.num_prefill_tokens if"
                " sequence.num_prefill_tokens > sequence.num_prompt_tokens and reached()"
                " else sequence.num_prompt_tokens]",
            ),
        ),
        needs=frozenset({"penalties"}),
    ),
    Fault(
        name="processor-state-not-replayed",
        mechanism="a stateful processor starts again after a preemption without the outputs",
        source="https://github.com/vllm-project/vllm/issues/29045",
        expected=("TOK",),
        patches=(
            Patch(
                "preempt_engine.sampling.history:ProcessorState._follow",
                "seen = self._seen = []",
                "seen = self._seen = list(output_token_ids) if output_token_ids"
                " and reached() else []",
            ),
        ),
        needs=frozenset({"logits_processors"}),
    ),
    Fault(
        name="prompt-logprobs-lost-in-prefill",
        mechanism="a preemption during the prefill loses one of the prompt's log probabilities",
        source="https://github.com/vllm-project/vllm/issues/29071",
        expected=("DEL", "TOK", "CRASH"),
        patches=(
            before(
                "preempt_engine.residency:Residency.preempt",
                "self.waiting.push(request)",
                "done = request.sequence.first_wanted_logits - (request.score_from or 0)\n"
                "if request.score_from is not None and request.num_to_score > done and"
                " reached():\n"
                "    request.num_to_score -= 1",
            ),
        ),
        needs=frozenset({"prompt_logprobs"}),
    ),
    Fault(
        name="prompt-logprobs-twice",
        mechanism="after a preemption the prompt's log probabilities are appended again",
        source="mechanism",
        expected=("DEL", "TOK", "CRASH"),
        patches=(
            before(
                "preempt_engine.residency:Residency.preempt",
                "self.waiting.push(request)",
                "if request.score_from is not None and mode == 'recompute' and reached():\n"
                "    request.sequence.first_wanted_logits = request.score_from",
            ),
        ),
        needs=frozenset({"prompt_logprobs"}),
    ),
    Fault(
        name="processors-replay-the-tail",
        mechanism="processors of a request that comes back are told the latest outputs only",
        source="mechanism",
        expected=("TOK", "DEL"),
        patches=(
            Patch(
                "preempt_engine.sampling.history:ProcessorState._follow",
                "for token_id in output_token_ids[len(seen) :]:",
                "if len(output_token_ids) > 32 and not seen and reached():\n"
                "    seen += output_token_ids[:-32]\n"
                "for token_id in output_token_ids[len(seen) :]:",
            ),
        ),
    ),
    Fault(
        name="user-processor-is-not-copied",
        mechanism="sequences share the user's processor; one that comes back resets the others'",
        source="mechanism",
        expected=("TOK", "DEL"),
        patches=(
            Patch(
                "preempt_engine.sampling.processors:UserProcessor.reset",
                "self._processor = copy.deepcopy(self._original)",
                "self._processor = self._original",
            ),
        ),
    ),
)
