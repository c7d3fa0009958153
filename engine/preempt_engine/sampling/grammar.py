"""Structured output: which tokens keep the text inside a JSON schema or a regular expression.

Owns everything that touches `xgrammar` (https://github.com/mlc-ai/xgrammar), which is imported when
the first grammar is compiled. A matcher is a processor like any other: a function of the output
tokens, rebuilt by replaying them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

from preempt_engine.errors import ConfigError, InfeasibleRequestError
from preempt_engine.sampling.params import StructuredOutputsParams
from preempt_engine.tokenizer import HFTokenizer, Tokenizer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class GrammarCompiler:
    """Compiles grammars for one tokenizer; equal ones are compiled once.

    Args:
        tokenizer: of the model.
        vocab_size: of the model, which may be larger than the tokenizer's.
        eos_token_ids: end the text; allowed where it is complete.

    Raises:
        ConfigError: `xgrammar` is not installed, there is no tokenizer, or no token that ends.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        try:
            import xgrammar
        except ImportError as error:
            raise ConfigError(
                "structured_outputs needs xgrammar, which is not installed.",
                'Install it with: pip install "preempt-harness[grammar]".',
            ) from error
        if tokenizer is None or not eos_token_ids:
            raise ConfigError(
                "structured_outputs needs a tokenizer and an end-of-sequence token, and the engine "
                f"has {'no tokenizer' if tokenizer is None else 'no such token'}.",
                "Build the engine with the model's tokenizer, or leave structured_outputs out.",
            )
        self._vocab_size = vocab_size
        self._compiler = xgrammar.GrammarCompiler(
            _tokenizer_info(tokenizer, vocab_size, sorted(eos_token_ids))
        )

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """The grammar of a schema or an expression.

        Raises:
            InfeasibleRequestError: it is malformed, or uses what `xgrammar` does not support.
        """
        try:
            if params.regex is not None:
                compiled = self._compiler.compile_regex(params.regex)
            else:
                assert isinstance(params.json, str)
                compiled = self._compiler.compile_json_schema(
                    params.json, any_whitespace=False, separators=(",", ":")
                )
        except (RuntimeError, ValueError) as error:  # all it says about a malformed grammar
            raise InfeasibleRequestError(
                f"structured_outputs cannot be compiled: {str(error).strip()}",
                "Correct the schema or the expression.",
            ) from error
        return Grammar(compiled, self._vocab_size)


class Grammar:
    """A compiled grammar.

    Args:
        compiled: of `xgrammar`.
        vocab_size: of the model.
    """

    def __init__(self, compiled: Any, vocab_size: int) -> None:
        self._compiled = compiled
        self._vocab_size = vocab_size

    def matcher(self) -> GrammarMatcher:
        """A matcher at the beginning of the text."""
        return GrammarMatcher(self._compiled, self._vocab_size)


class GrammarMatcher:
    """Forbids every token after which the text could not be completed any more.

    Args:
        compiled: of `xgrammar`.
        vocab_size: of the model.
    """

    def __init__(self, compiled: Any, vocab_size: int) -> None:
        import numpy as np
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._vocab_size = vocab_size
        self._bits = np.zeros((1, -(-vocab_size // 32)), dtype=np.int32)

    def reset(self, prompt_token_ids: Seq[int]) -> None:
        self._matcher.reset()

    def accept(self, token_id: int) -> None:
        accepted = self._matcher.accept_token(token_id)
        assert accepted, f"token {token_id} was sampled although the grammar forbids it"

    def process(self, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        import numpy as np

        if self._matcher.fill_next_token_bitmask(self._bits):
            # Bit i of word w stands for token 32 w + i.
            bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little")
            scores[bits[: self._vocab_size] == 0] = -math.inf
        return scores


def _tokenizer_info(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: list[int]) -> Any:
    import xgrammar

    if isinstance(tokenizer, HFTokenizer):
        return xgrammar.TokenizerInfo.from_huggingface(
            tokenizer.transformers_tokenizer, vocab_size=vocab_size, stop_token_ids=eos_token_ids
        )
    return xgrammar.TokenizerInfo(
        [tokenizer.decode([token_id]) for token_id in range(tokenizer.vocab_size)],
        vocab_type=xgrammar.VocabType.RAW,
        vocab_size=vocab_size,
        stop_token_ids=eos_token_ids,
    )
