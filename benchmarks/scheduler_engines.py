"""Schedulers under load: the embedded engine's, nano-vllm's and vLLM's, each without its workers.

    python -m benchmarks.scheduler_engines ENGINE

reads a case a line from its standard input, answers each with a line, and measures once for every
empty line that follows; `benchmarks.scheduler` runs it, with the Python that has the engine.

A step is what an engine decides, and what it does with the tokens that come of it: it schedules,
accounts for blocks, appends a token to each sequence and ends those that are long enough. Nothing
is computed and no text is made.
"""

from __future__ import annotations

import contextlib
import gc
import json
import random
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from types import SimpleNamespace
from typing import Protocol

import msgspec

BLOCK_SIZE = 16
_VOCAB_SIZE = 64
_TOKEN_ID = 7  # every engine is told that this one came


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """What a scheduler is measured on.

    Attributes:
        running: sequences that run at once.
        context: tokens of each prompt, and up to a block more, lest all need blocks in one step.
        num_blocks: size of the pool; it never runs short.
        turnover: one request ends in every step, and another takes its place; without, all go on.
        steps: that are measured at a time.
        max_steps: that are run in all.
    """

    running: int
    context: int
    num_blocks: int
    turnover: bool
    steps: int
    max_steps: int

    @property
    def max_num_batched_tokens(self) -> int:
        """All prompts in one step."""
        return self.running * (self.context + BLOCK_SIZE)

    @property
    def max_model_len(self) -> int:
        return self.context + BLOCK_SIZE + self.running + self.max_steps + 2


class Engine(Protocol):
    """A scheduler with what it takes to run it."""

    def add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        """Queue a request."""
        ...

    def step(self) -> tuple[int, int]:
        """Run a step; returns how many sequences it scheduled, and how many requests ended."""
        ...


class EmbeddedEngine:
    """The scheduler of `preempt_engine`; what `LLM.update` does beside sampling is done here."""

    def __init__(self, case: Case) -> None:
        from preempt_engine.config import EngineConfig
        from preempt_engine.sampling.params import SamplingParams
        from preempt_engine.scheduler import Scheduler
        from preempt_engine.sequence import Request

        config = EngineConfig(
            model="exact",
            block_size=BLOCK_SIZE,
            max_num_seqs=case.running,
            max_num_batched_tokens=case.max_num_batched_tokens,
            max_model_len=case.max_model_len,
        )
        self.scheduler = Scheduler(config, case.num_blocks)
        self._params = SamplingParams
        self._create = Request.create
        self._num_arrived = 0

    def add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        params = self._params(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self._num_arrived += 1
        self.scheduler.add(
            self._create(
                request_id=name,
                arrival_index=self._num_arrived,
                prompt_token_ids=prompt,
                params=params,
                seed=0,
            )
        )

    def step(self) -> tuple[int, int]:
        scheduler, num_ended = self.scheduler, 0
        step = scheduler.schedule()
        for item, request in zip(step.scheduled, scheduler.advance(step), strict=True):
            assert request is not None
            sequence = request.sequences[item.key.branch]
            sequence.first_wanted_logits += 1
            scheduler.append_token(sequence, _TOKEN_ID)
            num_output_tokens = len(sequence.token_ids) - sequence.num_prompt_tokens
            if num_output_tokens >= request.max_output_tokens:
                scheduler.finish(request, "length")
                num_ended += 1
        return len(step.scheduled), num_ended


class ObservedEngine(EmbeddedEngine):
    """The same, and an observer that forgets what it is told."""

    def __init__(self, case: Case) -> None:
        from preempt_engine.observer import EngineObserver

        super().__init__(case)
        self.scheduler.observer = EngineObserver()


class NanoVllmEngine:
    """nano-vllm's, whichever the adapter finds: the package, or a checkout."""

    def __init__(self, case: Case) -> None:
        from preempt_harness.adapters.nano_vllm_source import NanoVllm, find_source

        source = find_source()
        assert source is not None, "nano-vllm is not there"
        self._nano = NanoVllm(source[0])
        self._nano.sequence_class.block_size = BLOCK_SIZE
        self._scheduler = self._nano.scheduler_class(
            SimpleNamespace(
                max_num_seqs=case.running,
                max_num_batched_tokens=case.max_num_batched_tokens,
                eos=-1,
                num_kvcache_blocks=case.num_blocks,
                kvcache_block_size=BLOCK_SIZE,
            )
        )
        self._takes_phase = self._scheduler.postprocess.__code__.co_argcount > 3

    def add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        params = self._nano.sampling_params_class(max_tokens=max_tokens, ignore_eos=True)
        self._scheduler.add(self._nano.sequence_class(prompt, params))

    def step(self) -> tuple[int, int]:
        scheduler = self._scheduler
        before = len(scheduler.running) + len(scheduler.waiting)
        sequences, is_prefill = scheduler.schedule()
        phase = (is_prefill,) if self._takes_phase else ()
        scheduler.postprocess(sequences, [_TOKEN_ID] * len(sequences), *phase)
        return len(sequences), before - len(scheduler.running) - len(scheduler.waiting)


class VllmEngine:
    """vLLM's, with the synchronous scheduler of its engine core."""

    def __init__(self, case: Case) -> None:
        from preempt_harness.adapters import vllm_engine
        from preempt_harness.adapters.protocol import EngineSettings

        settings = EngineSettings(
            num_blocks=case.num_blocks + 1,  # the first is nobody's
            block_size=BLOCK_SIZE,
            max_num_seqs=case.running,
            max_num_batched_tokens=case.max_num_batched_tokens,
        )
        config = vllm_engine.make_config(settings, case.max_model_len)
        self._scheduler = vllm_engine.make_scheduler(config, settings)
        self._hasher = vllm_engine.block_hasher(BLOCK_SIZE)
        self._make_request = vllm_engine.make_request
        self._output = vllm_engine.vllm().ModelRunnerOutput
        self._num_arrived = 0

    def add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        from preempt_harness.workload import RequestSpec, SamplingSpec

        sampling = SamplingSpec(max_tokens=max_tokens)
        request = RequestSpec(id=name, prompt_token_ids=prompt, sampling=sampling)
        self._num_arrived += 1
        self._scheduler.add_request(self._make_request(request, self._num_arrived, self._hasher))

    def step(self) -> tuple[int, int]:
        scheduler = self._scheduler
        before = len(scheduler.requests)
        step = scheduler.schedule()
        names = list(step.num_scheduled_tokens)
        scheduler.update_from_output(
            step,
            self._output(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=[[_TOKEN_ID]] * len(names),
            ),
        )
        return len(names), before - len(scheduler.requests)


ENGINES: dict[str, Callable[[Case], Engine]] = {
    "embedded": EmbeddedEngine,
    "embedded, observed": ObservedEngine,
    "nano-vllm": NanoVllmEngine,
    "vLLM": VllmEngine,
}


class Load:
    """A scheduler with all requests of a case running.

    Args:
        engine: of which nothing has been asked yet.
        case: what to ask.
    """

    def __init__(self, engine: Engine, case: Case) -> None:
        self._engine = engine
        self._case = case
        self._source = random.Random(0)
        self._num_added = 0
        for index in range(case.running):
            most = index + 1 if case.turnover else case.max_steps + 2
            self._add(case.context + index % BLOCK_SIZE, most)
        self.run(2)

    def run(self, steps: int) -> tuple[int, int]:
        """Run steps; returns how many, and the sequences that they scheduled."""
        num_scheduled = num_steps = 0
        while num_steps < steps:
            scheduled, ended = self._engine.step()
            num_scheduled += scheduled
            num_steps += 1
            for _ in range(ended):
                self._add(self._case.context, self._case.running)
        return num_steps, num_scheduled

    def microseconds(self) -> float:
        """CPU time of a scheduled sequence, over the steps of the case."""
        gc.collect()
        started = time.process_time()
        _, num_scheduled = self.run(self._case.steps)
        return 1e6 * (time.process_time() - started) / num_scheduled

    def _add(self, num_tokens: int, max_tokens: int) -> None:
        self._num_added += 1
        prompt = [self._source.randrange(4, _VOCAB_SIZE) for _ in range(num_tokens)]
        self._engine.add(f"r{self._num_added}", prompt, max_tokens)


def main() -> None:
    """Serve cases; see above."""
    engine = ENGINES[sys.argv[1]]
    load: Load | None = None
    for line in sys.stdin:
        if not line.strip():
            assert load is not None, "no case yet"
            answer: object = load.microseconds()
        else:
            load = None
            gc.unfreeze()
            gc.collect()
            case = msgspec.json.decode(line, type=Case)
            with contextlib.redirect_stdout(sys.stderr):  # engines log there
                load = Load(engine(case), case)
            gc.collect()
            gc.freeze()  # what is there before the first step is looked at no more
            answer = engine_version(sys.argv[1])
        print(json.dumps(answer), flush=True)


def engine_version(name: str) -> str:
    """Of what is measured."""
    if name == "nano-vllm":
        from preempt_harness.adapters.nano_vllm_source import find_source

        source = find_source()
        assert source is not None
        return source[1]
    return version("vllm") if name == "vLLM" else ""


if __name__ == "__main__":
    main()
