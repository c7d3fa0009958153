"""One rank of an engine: takes the driver's frames, gives its answers. Knows no sockets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from preempt_engine.executor.reports import ReportCollector
from preempt_engine.executor.shares import ShareCodec, select_share_codec
from preempt_engine.executor.step_codec import StepDecoder
from preempt_engine.executor.wire import (
    Frame,
    Init,
    MessageKind,
    Ready,
    StepDone,
    decode_body,
    encode_body,
    encode_step_done,
)
from preempt_engine.worker.build import build_runner
from preempt_engine.worker.hooks import run_worker_hooks

if TYPE_CHECKING:
    from preempt_engine.executor.protocol import Runner


class Rank:
    """Answers one driver, whose first message is INIT.

    Args:
        rank: tensor parallel rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._decoder = StepDecoder()
        self._reports = ReportCollector()

    def answer(self, frame: Frame) -> Frame | None:
        """Do what a message asks for.

        Returns:
            What the driver is told; None after CLOSE, behind which nothing may come.

        Raises:
            Exception: whatever the runner raises, and WireProtocolError.
        """
        if frame.kind is MessageKind.INIT:
            return Frame(MessageKind.READY, encode_body(self._start(decode_body(frame.body, Init))))
        if frame.kind is MessageKind.STEP:
            return Frame(MessageKind.STEP_DONE, self._step(frame.body))
        if frame.kind is MessageKind.RESET:
            self._decoder.reset()
            self._runner.reset()
            return Frame(MessageKind.RESET_DONE, b"")
        assert frame.kind is MessageKind.CLOSE, frame.kind
        self._runner.close()
        return None

    def _start(self, init: Init) -> Ready:
        self._runner: Runner = build_runner(init.config, self._rank, init.store_fd)
        run_worker_hooks(init.config.worker_hooks, self._runner)
        self._codec: ShareCodec = select_share_codec(init.config, self._runner.vocab_size)
        return Ready(
            num_kv_blocks=self._runner.num_kv_blocks,
            num_host_blocks=self._runner.num_host_blocks,
            vocab_size=self._runner.vocab_size,
            max_model_len=self._runner.max_model_len,
            eos_token_ids=sorted(self._runner.eos_token_ids),
        )

    def _step(self, body: bytes) -> bytes:
        step, wants_reports = self._decoder.decode(body)
        self._runner.observer = self._reports if wants_reports else None
        share = self._codec.encode(self._rank, step, self._runner.execute(step))
        return encode_step_done(StepDone(step.step_id, share, self._reports.take()))
