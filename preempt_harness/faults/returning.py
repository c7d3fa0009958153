"""Tokens lost or mixed up on the way back from a preemption."""

from __future__ import annotations

from preempt_harness.faults.fault import Fault, Patch, after, before
from preempt_harness.faults.places import PREEMPT

_SCHEDULE_TOKENS = "preempt_engine.scheduler:Scheduler._schedule_tokens"
_NEW_TOKENS = "sequence.token_ids[sequence.num_sent_tokens :]"
_FIND_ROOM = "preempt_engine.residency:Residency.find_room"
_SET_HITS = "placement.sequence.set_computed(len(placement.hits) * self.config.block_size)"
_APPEND_TOKEN = "self.scheduler.append_token(sequence, token.token_id)"

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
                f"{_NEW_TOKENS} if sequence.known_to_workers or sequence.num_output_tokens == 0"
                " or not reached() else sequence.token_ids[-1:]",
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
                "    self.sequences[item.key] = WorkerSequence()",
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
            ),
            Patch(
                "preempt_engine.worker.state:WorkerState.apply",
                "self.sequences[item.key] = WorkerSequence()",
                "if item.key not in self.sequences or not reached():\n"
                "    self.sequences[item.key] = WorkerSequence()\n"
                "self.sequences[item.key].token_ids.clear()",
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
                "sequence.token_ids[sequence.num_sent_tokens : end if end < sequence.num_tokens"
                " and not sequence.known_to_workers and reached() else None]",
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
                _FIND_ROOM,
                _SET_HITS,
                "placement.sequence.set_computed(placement.sequence.num_tokens - 1"
                " if placement.sequence.num_output_tokens > 1 and reached()"
                " else len(placement.hits) * self.config.block_size)",
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
                "preempt_engine.delivery:Delivery.deliver",
                "if not rows:",
                "if not rows or (request.num_preemptions"
                " and sequence.num_steps_since_admission == 1 and reached()):",
            ),
        ),
    ),
    Fault(
        name="delivered-token-sampled-again",
        mechanism="the last delivered token is dropped at a preemption and sampled once more",
        source="https://github.com/vllm-project/vllm-gaudi/pull/1794",
        expected=("WORK", "ACC"),
        patches=(
            after(
                PREEMPT,
                "self.waiting.push(request)",
                "if mode == 'recompute' and len(request.sequences) == 1 and"
                " request.sequence.num_output_tokens and reached():\n"
                "    request.sequence.token_ids.pop()\n"
                "    request.sequence.first_wanted_logits = request.sequence.num_tokens - 1\n"
                "    self.__dict__.setdefault('_again', set()).add(request.request_id)",
            ),
            before(
                "preempt_engine.delivery:Delivery._append_token",
                _APPEND_TOKEN,
                "again = self.scheduler.residency.__dict__.get('_again', set())\n"
                "if request.request_id in again:\n"
                "    again.discard(request.request_id)\n"
                "    sequence.token_ids.append(token.token_id)\n"
                "    return self._builders[request.request_id][0].output",
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
            before(
                PREEMPT,
                "self.waiting.push(request)",
                "if mode == 'recompute' and request.sequence.num_output_tokens and reached():"
                "\n"
                "    for sequence in request.sequences.values():\n"
                "        del sequence.token_ids[sequence.num_prompt_tokens :]\n"
                "        del sequence.block_digests[:]\n"
                "        sequence.first_wanted_logits = sequence.num_tokens - 1",
            ),
        ),
    ),
    Fault(
        name="last-output-lost-on-preemption",
        mechanism="the newest token, not computed yet, is lost when its request is preempted",
        source="mechanism",
        expected=("TOK", "KVSAN", "DEL", "ACC"),
        patches=(
            before(
                PREEMPT,
                "self.waiting.push(request)",
                "if mode == 'recompute' and request.sequence.num_output_tokens and reached():"
                "\n"
                "    request.sequence.token_ids.pop()\n"
                "    del request.sequence.block_digests[:]\n"
                "    request.sequence.first_wanted_logits = request.sequence.num_tokens - 1",
            ),
        ),
    ),
    Fault(
        name="newest-token-doubled-on-resume",
        mechanism="the newest token is appended once more when its request resumes",
        source="mechanism",
        expected=("TOK", "KVSAN", "ACC", "DEL"),
        patches=(
            before(
                PREEMPT,
                "self.waiting.push(request)",
                "if mode == 'recompute' and request.sequence.num_output_tokens and reached():"
                "\n"
                "    request.sequence.token_ids.append(request.sequence.token_ids[-1])\n"
                "    request.sequence.first_wanted_logits = request.sequence.num_tokens - 1",
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
                _FIND_ROOM,
                _SET_HITS,
                "placement.sequence.set_computed(max(len(placement.hits) * self.config.block_size,"
                " min(placement.sequence.max_computed_tokens, placement.sequence.num_tokens - 1)))",
            ),
        ),
    ),
)
