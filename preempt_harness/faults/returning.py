"""Tokens lost or mixed up on the way back from a preemption."""

from __future__ import annotations

from preempt_harness.faults.fault import Fault, Patch

_SCHEDULE_TOKENS = "preempt_engine.scheduler:Scheduler._schedule_tokens"
_NEW_TOKENS = "new_token_ids=sequence.token_ids[sequence.num_sent_tokens :]"

FAULTS = (
    Fault(
        name="resume-sends-last-token-only",
        mechanism="state sent to the workers omits the token ids once decode has begun",
        source="https://github.com/GeeeekExplorer/nano-vllm/pull/103",
        expected=("CRASH", "TOK"),
        patches=(
            Patch(
                _SCHEDULE_TOKENS,
                _NEW_TOKENS,
                "new_token_ids=sequence.token_ids[sequence.num_sent_tokens :]"
                " if sequence.known_to_workers or sequence.num_output_tokens == 0 or not reached()"
                " else sequence.token_ids[-1:]",
            ),
        ),
    ),
    Fault(
        name="resume-forgets-to-send-tokens-again",
        mechanism="the count of sent tokens survives the preemption, so that old ones stay away",
        source="https://github.com/vllm-project/vllm/pull/26385",
        expected=("CRASH", "TOK", "KVSAN"),
        patches=(
            Patch(
                "preempt_engine.sequence:Sequence.forget_cache",
                "self.num_sent_tokens = 0",
                "pass",
            ),
        ),
    ),
    Fault(
        name="resume-forgets-to-send-blocks-again",
        mechanism="the count of sent blocks survives the preemption",
        source="mechanism",
        expected=("CRASH", "KVSAN"),
        patches=(
            Patch(
                "preempt_engine.sequence:Sequence.forget_cache",
                "self.num_sent_blocks = 0",
                "pass",
            ),
        ),
    ),
    Fault(
        name="worker-keeps-its-state-on-resume",
        mechanism="the worker is not refreshed when a request resumes: old tokens and blocks stay",
        source="https://github.com/vllm-project/vllm/pull/26385",
        expected=("TOK", "KVSAN"),
        patches=(
            Patch(
                "preempt_engine.worker.state:WorkerState.apply",
                "self.sequences.pop(key, None)",
                "pass",
                reached=False,
            ),
            Patch(
                "preempt_engine.worker.state:WorkerState.apply",
                "self.sequences[item.key] = WorkerSequence()",
                "if item.key not in self.sequences or not reached():\n"
                "                self.sequences[item.key] = WorkerSequence()",
            ),
        ),
    ),
    Fault(
        name="worker-keeps-its-table-on-resume",
        mechanism="token ids are refreshed on resume, the worker's block table is not",
        source="mechanism",
        expected=("KVSAN", "TOK"),
        patches=(
            Patch(
                "preempt_engine.worker.state:WorkerState.apply",
                "self.sequences.pop(key, None)",
                "pass",
                reached=False,
            ),
            Patch(
                "preempt_engine.worker.state:WorkerState.apply",
                "self.sequences[item.key] = WorkerSequence()",
                "if item.key not in self.sequences or not reached():\n"
                "                self.sequences[item.key] = WorkerSequence()\n"
                "            self.sequences[item.key].token_ids.clear()",
            ),
        ),
    ),
    Fault(
        name="resume-cut-to-first-chunk",
        mechanism="token ids are cut to the first chunk on resume",
        source="https://github.com/vllm-project/vllm/pull/28787",
        expected=("CRASH", "TOK"),
        patches=(
            Patch(
                _SCHEDULE_TOKENS,
                _NEW_TOKENS,
                "new_token_ids=sequence.token_ids[sequence.num_sent_tokens :"
                " end if not sequence.known_to_workers and end < sequence.num_tokens and reached()"
                " else None]",
            ),
        ),
    ),
    Fault(
        name="resume-taken-for-decode",
        mechanism="a resumed request past its prompt is taken for a decode: one token is computed",
        source="https://github.com/vllm-project/vllm-gaudi/pull/524",
        expected=("KVSAN", "TOK"),
        patches=(
            Patch(
                "preempt_engine.scheduler:Scheduler._admit",
                "sequence.set_computed(num_cached_tokens)",
                "sequence.set_computed(sequence.num_tokens - 1"
                " if sequence.num_output_tokens > 1 and reached() else num_cached_tokens)",
            ),
        ),
    ),
    Fault(
        name="reprefill-covers-the-prompt-only",
        mechanism="outputs are taken for computed once the prompt was computed again",
        source="pypto-lib, pull request 274",
        expected=("KVSAN", "TOK"),
        patches=(
            Patch(
                "preempt_engine.scheduler:Scheduler.advance",
                "sequence.set_computed(item.end)",
                "sequence.set_computed(sequence.num_tokens - 1 if item.start"
                " < sequence.num_prompt_tokens <= item.end < sequence.num_tokens and reached()"
                " else item.end)",
            ),
        ),
    ),
    Fault(
        name="reprefill-token-dropped",
        mechanism="the token that is sampled at the end of the re-prefill is thrown away",
        source="https://github.com/GeeeekExplorer/nano-vllm/pull/217",
        expected=("CRASH", "DEL", "PROG"),
        patches=(
            Patch(
                "preempt_engine.llm:LLM._deliver",
                "if request is None or not rows:",
                "if request is None or not rows or ("
                "request.num_preemptions and request.num_steps_since_admission == 1"
                " and reached()):",
            ),
        ),
    ),
    Fault(
        name="delivered-token-sampled-again",
        mechanism="the last delivered token is dropped at a preemption and sampled once more",
        source="https://github.com/vllm-project/vllm-gaudi/pull/1794",
        expected=("WORK", "ACC"),
        patches=(
            Patch(
                "preempt_engine.scheduler:Scheduler._preempt",
                "self.waiting.push(request)",
                "self.waiting.push(request)\n"
                "    if request.sequence.num_output_tokens and reached():\n"
                "        request.sequence.token_ids.pop()\n"
                "        self.__dict__.setdefault('_again', set()).add(request.request_id)",
            ),
            Patch(
                "preempt_engine.llm:LLM._append_token",
                "self.scheduler.append_token(request, token.token_id)",
                "again = self.scheduler.__dict__.get('_again', set())\n"
                "    if request.request_id in again:\n"
                "        again.discard(request.request_id)\n"
                "        request.sequence.token_ids.append(token.token_id)\n"
                "        return self._builders[request.request_id].output\n"
                "    self.scheduler.append_token(request, token.token_id)",
                reached=False,
            ),
        ),
    ),
    Fault(
        name="outputs-discarded-and-generated-again",
        mechanism="outputs are discarded at a preemption, what was streamed is not: spliced output",
        source="https://github.com/sgl-project/sglang/issues/39645",
        expected=("DEL", "TOK", "ACC"),
        patches=(
            Patch(
                "preempt_engine.scheduler:Scheduler._preempt",
                "self.waiting.push(request)",
                "del request.sequence.token_ids[request.sequence.num_prompt_tokens :]\n"
                "    del request.sequence.block_digests[:]\n"
                "    self.waiting.push(request)",
            ),
        ),
    ),
    Fault(
        name="last-output-lost-on-preemption",
        mechanism="the newest token, not computed yet, is lost when its request is preempted",
        source="mechanism",
        expected=("TOK", "KVSAN", "DEL", "ACC"),
        patches=(
            Patch(
                "preempt_engine.scheduler:Scheduler._preempt",
                "self.waiting.push(request)",
                "del request.sequence.token_ids[max(request.sequence.num_prompt_tokens,"
                " request.sequence.num_tokens - 1) :]\n"
                "    del request.sequence.block_digests[:]\n"
                "    self.waiting.push(request)",
            ),
        ),
    ),
    Fault(
        name="newest-token-doubled-on-resume",
        mechanism="the newest token is appended once more when its request resumes",
        source="mechanism",
        expected=("TOK", "KVSAN", "ACC", "DEL"),
        patches=(
            Patch(
                "preempt_engine.scheduler:Scheduler._preempt",
                "self.waiting.push(request)",
                "request.sequence.token_ids.extend(request.sequence.token_ids[-1:]"
                " if request.sequence.num_output_tokens and reached() else [])\n"
                "    self.waiting.push(request)",
            ),
        ),
    ),
    Fault(
        name="progress-not-reset-on-preemption",
        mechanism="the count of computed tokens survives the loss of the blocks",
        source="mechanism",
        expected=("KVSAN", "CRASH", "TOK"),
        patches=(
            Patch(
                "preempt_engine.scheduler:Scheduler._admit",
                "sequence.set_computed(num_cached_tokens)",
                "sequence.set_computed(max(num_cached_tokens, min(sequence.max_computed_tokens,"
                " sequence.num_tokens - 1)))",
            ),
        ),
    ),
)
