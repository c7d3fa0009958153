"""The arguments of `LLM.generate`, made lists of equal length, and its progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import cast

from preempt_engine.errors import ConfigError
from preempt_engine.sampling.params import BeamSearchParams, SamplingParams

Prompt = str | Seq[int]
"""Text, or token ids."""
Params = SamplingParams | BeamSearchParams


def prompt_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    """A list of prompts, of one or of many."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [cast("Seq[int]", prompts)]
    return list(cast("Seq[Prompt]", prompts))


def params_list(params: Params | Seq[Params] | None, num_prompts: int) -> list[Params]:
    """One per prompt."""
    if params is None or isinstance(params, SamplingParams | BeamSearchParams):
        return [params or SamplingParams()] * num_prompts
    if len(params) != num_prompts:
        raise ConfigError(
            f"{len(params)} SamplingParams for {num_prompts} prompts.",
            "Give one for all prompts, or one per prompt.",
        )
    return list(params)


def priority_list(priority: Seq[int] | None, num_prompts: int) -> list[int]:
    """One per prompt, 0 by default."""
    if priority is None:
        return [0] * num_prompts
    if len(priority) != num_prompts:
        raise ConfigError(
            f"{len(priority)} priorities for {num_prompts} prompts.", "Give one per prompt."
        )
    return list(priority)


@contextmanager
def progress_bar(total: int, *, enabled: bool) -> Iterator[Callable[[], None]]:
    """Yields a function to call once per finished request."""
    if not enabled:
        yield lambda: None
        return
    from tqdm import tqdm

    with tqdm(total=total, desc="Generating", unit="request", dynamic_ncols=True) as bar:

        def advance() -> None:
            bar.update(1)

        yield advance
