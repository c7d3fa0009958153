"""Sessions in which calls of the embedded engine run the steps: `LLM.generate`, `LLM.stream`.

Such a call has a loop of its own, in which nobody can do anything between two steps. Here it runs
in a thread that waits behind each step for the next poll, so that a plan acts between its steps as
it does between those of any session. Only one of the two threads ever runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import GeneratorType
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

from preempt_harness.adapters.embedded import EmbeddedSession
from preempt_harness.adapters.embedded_arguments import engine_params
from preempt_harness.adapters.embedded_pool import EnginePool
from preempt_harness.adapters.protocol import EngineSettings
from preempt_harness.errors import HarnessError
from preempt_harness.record import AnyEvent, EngineError
from preempt_harness.workload import RequestSpec

if TYPE_CHECKING:
    from preempt_engine import RequestOutput
    from preempt_engine.outputs import StreamDelta

CALLS = ("generate", "stream")


class UnknownCallError(HarnessError, ValueError):
    """The option `call` names no call that runs steps."""


class _GivenUp(BaseException):
    """The session is closed before the call has returned; not an error of the engine."""


class CalledSession(EmbeddedSession):
    """A session whose steps are run by one call of the engine.

    Args:
        settings: of the trial, with the option "call": "generate", which is given all requests that
            there are when the first step is due (later ones are added beside it), or "stream", by
            which each request is read, in turns; to abort one is to close its stream.
        pool: where the engine comes from and goes.

    Raises:
        UnknownCallError: the option is neither.
    """

    def __init__(self, settings: EngineSettings, pool: EnginePool) -> None:
        self._name = settings.options["call"]
        if self._name not in CALLS:
            raise UnknownCallError(
                f"options={{'call': {self._name!r}}}: the embedded engine has no such call.",
                f"Use one of {', '.join(CALLS)}.",
            )
        super().__init__(settings, pool)
        self._waiting: list[RequestSpec] = []  # for the call of `generate`
        self._submitted: dict[str, RequestOutput] = {}  # live
        self._deltas: dict[str, GeneratorType[StreamDelta, None, None]] = {}
        self._pace = _Pace()
        self._errors: list[BaseException] = []
        self._expected: list[str] = []
        self._named: Iterator[str] = iter(())  # of the expected, those who are yet to come
        self._returned: list[RequestOutput] = []
        self._step_outputs: list[RequestOutput] = []
        self._hooks = ExitStack()
        self._submit_now = self.llm._submit
        self._hooks.enter_context(patch.object(self.llm, "_submit", self._noted))
        self._hooks.enter_context(patch.object(self.llm, "step", self._paced(self.llm.step)))

    def submit(self, request: RequestSpec) -> None:
        """Keep it for the next call of `generate`, or give it to the engine beside one."""
        if not self._unfinished:
            self._end_call()
        self._unfinished.add(request.id)
        if self._name == "generate" and not self._pace.is_under_way:
            self._waiting.append(request)
            return
        if self._name == "generate":
            super().submit(request)
            return
        deltas = self.llm.stream(
            request.prompt_token_ids,
            engine_params(request.sampling),
            request_id=request.id,
            priority=request.priority,
        )
        self._deltas[request.id] = cast("GeneratorType[StreamDelta, None, None]", deltas)

    def abort(self, request: str) -> None:
        """Close its stream, if that is what it has and nobody is reading it right now."""
        for waiting in [item for item in self._waiting if item.id == request]:
            self._waiting.remove(waiting)  # of a batch it could not be aborted yet
            super().submit(waiting)
        deltas = self._deltas.get(request)
        if deltas is None or deltas.gi_running:
            super().abort(request)
            return
        deltas.close()
        del self._deltas[request]
        self._streams.forget(request)  # nobody reads what it had yet to tell
        output = self._submitted[request]
        # Whoever ran the last step has yet to look at what it gave.
        self._step_outputs[:] = [other for other in self._step_outputs if other is not output]
        self._take(output)

    def unfinished(self) -> bool:
        """True while a request has not ended; the engine knows of none that waits for the call."""
        return bool(self._unfinished)

    def close(self) -> Sequence[AnyEvent]:
        """Let the call return if all has ended, and make sure that it gave what it promises."""
        if self._unfinished:
            self._pace.give_up()
        else:
            self._end_call()
        self._hooks.close()
        step = self.llm.scheduler.next_step_id
        return [
            *super().close(),
            *(
                EngineError(
                    step=step,
                    kind=type(error).__name__,
                    message=f"{self._name}(), when all has ended: {error}",
                )
                for error in self._errors
            ),
        ]

    def _end_call(self) -> None:
        """All has ended: the call must return, without another step, what it promises."""
        if self._pace.is_under_way:
            error = self._pace.finish() or self._wrong_return()
            self._errors += [error] if error is not None else []

    def _step(self) -> list[RequestOutput]:
        """Let the call run its next step."""
        if not self._unfinished:
            given = self._step_outputs  # of the call that waits
            outputs = super()._step()
            self._step_outputs = given
            return outputs
        self._step_outputs = []
        self._pace.go_on(self._generate if self._name == "generate" else self._read_in_turns)
        return self._step_outputs

    def _take(self, output: RequestOutput) -> None:
        if self._name == "stream":
            self._outputs[output.request_id] = output
            if output.finished:
                self._unfinished.discard(output.request_id)
        else:
            super()._take(output)

    def _generate(self) -> None:
        batch, self._waiting = self._waiting, []
        urgent = any(request.priority for request in batch)
        self._expected = [request.id for request in batch]
        self._returned = []
        self._named = iter(self._expected)
        self._returned = self.llm.generate(
            [request.prompt_token_ids for request in batch],
            [engine_params(request.sampling) for request in batch],
            use_tqdm=False,
            priority=[request.priority for request in batch] if urgent else None,
        )

    def _read_in_turns(self) -> None:
        """A delta of each stream, again and again, until all have ended."""
        while self._deltas:
            for request, deltas in list(self._deltas.items()):
                try:
                    delta = next(deltas, None)
                except Exception as error:
                    if error is not self._submitted[request].error:
                        raise
                    delta = None  # its own error, which its output tells, too
                if delta is None:
                    self._deltas.pop(request, None)
                    self._take(self._submitted[request])  # no step may have returned it
                else:
                    self._streams.take(delta)

    def _noted(
        self, prompt: Any, params: Any, priority: int, request_id: str | None = None
    ) -> RequestOutput:
        """In place of the engine's own: requests of `generate` get the names of the trial's."""
        output = self._submit_now(prompt, params, priority, request_id or next(self._named))
        self._submitted[output.request_id] = output
        return output

    def _paced(self, step: Callable[[], list[RequestOutput]]) -> Callable[[], list[RequestOutput]]:
        def paced() -> list[RequestOutput]:
            self._pace.begin_step()
            outputs = step()
            self._step_outputs = outputs
            self._pace.wait()
            return outputs

        return paced

    def _wrong_return(self) -> Exception | None:
        """What is wrong with what the call has returned."""
        if self._name != "generate":
            return None
        from preempt_engine.errors import QueueFullError

        names = [output.request_id for output in self._returned]
        unfinished = [output.request_id for output in self._returned if not output.finished]
        refused = [
            output.request_id
            for output in self._returned
            if isinstance(output.error, QueueFullError)
        ]
        if names == self._expected and not unfinished and not refused:
            return None
        return AssertionError(
            f"for {self._expected} it returns {names}, of which {unfinished} are unfinished, and a "
            f"full queue has turned away {refused}"
        )


class _Pace:
    """A thread beside the caller's; only one of the two runs at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._theirs = threading.Semaphore(0)
        self._ours = threading.Semaphore(0)
        self._error: BaseException | None = None
        self._gives_up = False
        self._must_end = False

    @property
    def is_under_way(self) -> bool:
        """Whether a call waits behind one of its steps."""
        return self._thread is not None and self._thread.is_alive()

    def go_on(self, call: Callable[[], None]) -> None:
        """Let the call run to the end of its next step, or make it if none is under way.

        Raises:
            BaseException: whatever the call raises.
        """
        if self.is_under_way:
            self._theirs.release()
        else:
            self._must_end = False
            self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
            self._thread.start()
        self._ours.acquire()
        error = self._take_error()
        if error is not None:
            raise error

    def finish(self) -> BaseException | None:
        """Let the call return; another step would be an error.

        Returns:
            What it raised.
        """
        self._must_end = True
        return self._end()

    def give_up(self) -> None:
        """End the call, if there is one, by an exception behind its last step."""
        self._gives_up = True
        if self.is_under_way:
            self._end()

    def begin_step(self) -> None:
        """From within the call, before it runs a step."""
        if self._must_end and threading.current_thread() is self._thread:
            raise AssertionError("it runs another step")

    def wait(self) -> None:
        """From within the call, behind a step: until the next one is wanted."""
        if threading.current_thread() is not self._thread:
            return
        self._ours.release()
        self._theirs.acquire()
        if self._gives_up:
            raise _GivenUp

    def _end(self) -> BaseException | None:
        assert self._thread is not None
        self._theirs.release()
        self._thread.join()
        self._ours.acquire()
        return self._take_error()

    def _run(self, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # the caller's to raise
            self._error = error
        finally:
            self._ours.release()

    def _take_error(self) -> BaseException | None:
        error, self._error = self._error, None
        return error
