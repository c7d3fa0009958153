"""What drafts save: output tokens per second and steps, with drafts and without, in turn.

    python -m benchmarks.spec_decode exact
    python -m benchmarks.spec_decode smollm2 --requests 1 --tokens 64

Prompts repeat a phrase, where drafts by lookup do best. CPU time of whole runs, greedy, with room.
Outputs are compared too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks.measure import machine, median_ratio, paired, print_table
from preempt_engine import LLM, SamplingParams

PHRASE = [11, 23, 37, 5, 41, 17, 29]


class Variant:
    """One engine, and what its last run gave.

    Args:
        model: as `LLM` knows it.
        speculative: how it drafts, None for not at all.
        prompts, num_tokens: what it generates.
    """

    def __init__(
        self,
        model: str,
        speculative: dict[str, Any] | None,
        prompts: list[list[int]],
        num_tokens: int,
    ) -> None:
        self._llm = LLM(
            model,
            num_kv_blocks=512,
            speculative_config=speculative,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
        )
        self._prompts = prompts
        self._params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        self.outputs: list[list[int]] = []

    def run(self) -> float:
        """CPU seconds."""
        self._llm.reset()
        start = time.process_time()
        outputs = self._llm.generate(self._prompts, self._params, use_tqdm=False)
        seconds = time.process_time() - start
        self.outputs = [output.outputs[0].token_ids for output in outputs]
        return seconds

    def figures(self) -> tuple[int, str]:
        """Steps, and accepted of drafted tokens, of the last run."""
        counters = self._llm.counters
        share = f"{counters.num_accepted_tokens} of {counters.num_drafted_tokens}"
        return counters.num_steps, share

    def close(self) -> None:
        """Release the engine."""
        self._llm.close()


def speculative_configs(model: str, count: int) -> dict[str, dict[str, Any] | None]:
    """What is compared, by name."""
    configs: dict[str, dict[str, Any] | None] = {
        "none": None,
        "ngram": {"method": "ngram", "num_speculative_tokens": count},
    }
    if model == "exact":
        for rate in (0.0, 0.7, 1.0):
            configs[f"scripted, {rate:.0%} right"] = {
                "method": "scripted",
                "num_speculative_tokens": count,
                "acceptance_rate": rate,
            }
    return configs


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help='"exact", or a model that the harness knows')
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=256, help="output tokens of a request")
    parser.add_argument("--drafts", type=int, default=4, help="most drafts in a step")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    path = arguments.model
    if path != "exact":
        from preempt_harness.checkpoints import resolve_model_name

        path = str(resolve_model_name(path))
    prompts = [
        [token_id + index for token_id in PHRASE * arguments.prompt][: arguments.prompt]
        for index in range(arguments.requests)
    ]
    print(machine())
    variants = {
        name: Variant(path, speculative, prompts, arguments.tokens)
        for name, speculative in speculative_configs(arguments.model, arguments.drafts).items()
    }
    runs: dict[str, Callable[[], float]] = {name: item.run for name, item in variants.items()}
    seconds = paired(runs, arguments.repeats)
    total = arguments.requests * arguments.tokens
    rows = []
    for name, variant in variants.items():
        steps, accepted = variant.figures()
        equal = sum(
            one == other
            for one, other in zip(variant.outputs, variants["none"].outputs, strict=True)
        )
        rows.append(
            [
                name,
                str(steps),
                accepted,
                f"{total / median(seconds[name]):.1f}",
                f"{1 / median_ratio(seconds[name], seconds['none']):.2f}",
                f"{equal}/{arguments.requests}",
            ]
        )
        variant.close()
    print_table(
        ["drafts", "steps", "accepted", "output tokens/s", "to none", "equal outputs"], rows
    )


if __name__ == "__main__":
    main()
