"""From what a user asked for to the processors that do it.

Owns the order of the processors, and what is prepared once per request: tokenized bad words and the
compiled grammar. Must never know outputs or preemptions.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from preempt_engine.errors import ConfigError, InfeasibleRequestError
from preempt_engine.sampling.grammar import Grammar, GrammarCompiler
from preempt_engine.sampling.logits_processor import LogitsProcessor
from preempt_engine.sampling.params import SamplingParams
from preempt_engine.sampling.processors import (
    BadWords,
    LogitBias,
    Penalties,
    UserProcessor,
    tokenize_bad_words,
)
from preempt_engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ProcessorRecipe:
    """All it takes to build a request's processors, as often as needed.

    Attributes:
        params: the user's.
        vocab_size: of the model.
        bad_words: token sequences of `params.bad_words`.
        grammar: of `params.structured_outputs`.
    """

    params: SamplingParams
    vocab_size: int
    bad_words: Seq[Seq[int]]
    grammar: Grammar | None

    def build(self) -> list[LogitsProcessor]:
        """New processors in the order of their stages; what forbids tokens comes last, so that
        nothing lifts a ban."""
        params = self.params
        processors: list[LogitsProcessor] = []
        if params.logit_bias:
            processors.append(LogitBias(params.bias_pairs))
        processors += [UserProcessor(processor) for processor in params.logits_processors]
        if params.penalized:
            processors.append(Penalties(params, self.vocab_size))
        if self.bad_words:
            processors.append(BadWords(self.bad_words))
        if self.grammar is not None:
            processors.append(self.grammar.matcher())
        return processors


class RecipeBook:
    """Makes the recipes of one engine.

    Args:
        tokenizer: of the model, if there is one.
        vocab_size: of the model.
        eos_token_ids: end a text.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._grammars: GrammarCompiler | None = None  # made when the first grammar is asked for

    def recipe(self, params: SamplingParams) -> ProcessorRecipe:
        """Prepare what these parameters need.

        Raises:
            ConfigError: the engine lacks the tokenizer or the package that they need.
            InfeasibleRequestError: they name a token that the vocabulary lacks, a word that the
                tokenizer cannot write, or a malformed grammar.
        """
        for token_id, _ in params.bias_pairs:
            if not 0 <= token_id < self._vocab_size:
                raise InfeasibleRequestError(
                    f"logit_bias names token {token_id}, which is not in [0, {self._vocab_size}).",
                    "Use ids of the model's own tokenizer.",
                )
        return ProcessorRecipe(
            params=params,
            vocab_size=self._vocab_size,
            bad_words=self._bad_words(params.bad_words) if params.bad_words else (),
            grammar=self._grammar(params),
        )

    def _bad_words(self, words: Seq[str]) -> list[list[int]]:
        if self._tokenizer is None:
            raise ConfigError(
                "bad_words are texts, and the engine was built with skip_tokenizer_init=True.",
                "Build the engine with a tokenizer, or forbid single tokens with logit_bias.",
            )
        return tokenize_bad_words(words, self._tokenizer)

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        if params.structured_outputs is None:
            return None
        if self._grammars is None:
            self._grammars = GrammarCompiler(self._tokenizer, self._vocab_size, self._eos_token_ids)
        return self._grammars.compile(params.structured_outputs)
