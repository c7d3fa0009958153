"""transformers' continuous batching by its public manager, whose own thread makes the steps."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence

from preempt_harness import record
from preempt_harness.adapters import protocol
from preempt_harness.adapters.protocol import EngineSettings
from preempt_harness.adapters.transformers_cb import TransformersAdapter
from preempt_harness.adapters.transformers_cb_session import TransformersSession
from preempt_harness.record import AnyEvent

_POLL_S = 1.0  # a poll looks after the thread at least so often


class EngineThreadError(RuntimeError):
    """The manager's thread ended while requests were unfinished."""


class ThreadedTransformersAdapter(TransformersAdapter):
    """Adapter "transformers-cb-threaded": nothing can be forced or timed, as for any user."""

    name = "transformers-cb-threaded"
    capabilities = TransformersAdapter.capabilities - {protocol.STEPPED, protocol.PREEMPT}

    def open(self, settings: EngineSettings) -> ThreadedTransformersSession:
        """As for the stepped engine; the thread starts with the first poll."""
        return ThreadedTransformersSession(settings)


class ThreadedTransformersSession(TransformersSession):
    """The manager's own thread makes the steps; a poll waits for what it delivers."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        update = self._processor.update_batch

        def update_and_end_step() -> None:
            update()
            self._observer.end_step()

        self._has_raised = False
        self._processor.update_batch = update_and_end_step
        self._has_started = False

    def stream_to(self, sink: Callable[[Sequence[AnyEvent]], None]) -> None:
        """Not from the manager's thread: two threads would tell one story in pieces."""

    def poll(self, timeout_s: float) -> Sequence[AnyEvent]:
        """Wait for an output, or until the thread has died.

        Raises:
            Exception: what ended the thread. `generate_batch` would return what there is instead.
        """
        if not self._has_started:  # with all that was submitted before: they arrive together
            self._has_started = True
            self._manager.start()
        output = self._manager.get_result(timeout=min(timeout_s, _POLL_S))
        if output is not None:
            self._keep(output)
            self._drain()
        elif not self._manager.is_running():
            self._has_raised = True
            raise self._fatal_error() or EngineThreadError("the manager's thread ended")
        return self._observer.log.take_events()

    def close(self) -> Sequence[AnyEvent]:
        """Stop the thread, at once: a flush would wait for requests that hang.

        What ended the thread may come to light only here: the engine hands all requests back as
        failed before it says why.
        """
        if self._has_started:
            self._manager.stop(block=True, hard_stop=True)
        error = self._fatal_error()
        if error is not None and not self._has_raised:
            self._observer.log.emit(
                record.EngineError(
                    step=self._observer.log.step,
                    kind=type(error).__name__,
                    message=str(error),
                    traceback="".join(traceback.format_exception(error)),
                )
            )
        return super().close()

    def _fatal_error(self) -> Exception | None:
        error: Exception | None = self._manager.background_thread_status.fatal_error
        return error
