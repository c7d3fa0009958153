"""The processors of `SamplingParams`: penalties, bans, biases, and the user's own behind a guard.

`logits_processor.py` says what a processor is. Must never know requests, blocks or why a history
is rebuilt.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import TYPE_CHECKING

from preempt_engine.errors import InfeasibleRequestError, LogitsProcessorError
from preempt_engine.sampling.logits_processor import LogitsFunction, LogitsProcessor
from preempt_engine.sampling.params import SamplingParams
from preempt_engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class UserProcessor:
    """A user's processor, as the engine runs it: a copy of its own, and errors that name it.

    Args:
        processor: an object with state, which is copied, or a function of the output.

    Raises:
        LogitsProcessorError: from every method, when the user's code raises or returns what are
            no scores. It ends the request, not the engine.
    """

    def __init__(self, processor: LogitsProcessor | LogitsFunction) -> None:
        self._name = getattr(processor, "__qualname__", type(processor).__qualname__)
        self._original: LogitsProcessor = (
            processor if isinstance(processor, LogitsProcessor) else _FunctionProcessor(processor)
        )
        self._processor = self._original

    def reset(self, prompt_token_ids: Seq[int]) -> None:
        with self._errors_named():
            self._processor = copy.deepcopy(self._original)
            self._processor.reset(list(prompt_token_ids))

    def accept(self, token_id: int) -> None:
        with self._errors_named():
            self._processor.accept(token_id)

    def process(self, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        import numpy as np

        shape = scores.shape
        with self._errors_named():
            scores = np.asarray(self._processor.process(scores), dtype=np.float64)
        if scores.shape != shape or not bool((scores < math.inf).all()):
            raise LogitsProcessorError(
                f"The logits processor {self._name} returned scores of shape {scores.shape} for "
                f"{shape}, or a NaN, or +inf.",
                "Return one finite score or -inf per token of the vocabulary.",
            )
        return scores

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise LogitsProcessorError(
                f"The logits processor {self._name} raised {type(error).__name__}: {error}.",
                "Correct it; the other requests are not affected.",
            ) from error


class _FunctionProcessor:
    """A function of the output as a processor: it is given a copy of the output ids."""

    def __init__(self, function: LogitsFunction) -> None:
        self._function = function
        self._output_token_ids: list[int] = []

    def reset(self, prompt_token_ids: Seq[int]) -> None:
        self._output_token_ids = []

    def accept(self, token_id: int) -> None:
        self._output_token_ids.append(token_id)

    def process(self, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        return self._function(list(self._output_token_ids), scores)


class LogitBias:
    """Adds to the logits of some tokens.

    Args:
        bias: (token id, what is added) pairs, every id in the vocabulary.
    """

    def __init__(self, bias: Seq[tuple[int, float]]) -> None:
        self._token_ids = [token_id for token_id, _ in bias]
        self._values = [value for _, value in bias]

    def reset(self, prompt_token_ids: Seq[int]) -> None:
        """Has no state."""

    def accept(self, token_id: int) -> None:
        """Has no state."""

    def process(self, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        scores[self._token_ids] += self._values
        return scores


class Penalties:
    """Repetition, presence and frequency penalties.

    The repetition penalty looks at prompt and output, the other two at the output alone, in this
    order, as in vLLM (https://docs.vllm.ai/en/v0.20.0/api/vllm/sampling_params/). The repetition
    penalty is that of Keskar et al., "CTRL", https://arxiv.org/abs/1909.05858, section 4.1, with
    the usual change for negative logits; the others are OpenAI's
    (https://platform.openai.com/docs/guides/text-generation#frequency-and-presence-penalties).

    Args:
        params: the user's.
        vocab_size: of the model.
    """

    def __init__(self, params: SamplingParams, vocab_size: int) -> None:
        self._repetition = params.repetition_penalty
        self._presence = params.presence_penalty
        self._frequency = params.frequency_penalty
        self._vocab_size = vocab_size
        self.reset(())

    def reset(self, prompt_token_ids: Seq[int]) -> None:
        import numpy as np

        self._in_prompt = np.zeros(self._vocab_size, dtype=np.bool_)
        self._in_prompt[list(prompt_token_ids)] = True
        self._output_counts = np.zeros(self._vocab_size, dtype=np.int64)

    def accept(self, token_id: int) -> None:
        self._output_counts[token_id] += 1

    def process(self, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        in_output = self._output_counts > 0  # [vocab_size]
        seen = scores[self._in_prompt | in_output]
        factor = self._repetition
        seen[seen > 0] /= factor
        seen[seen < 0] *= factor
        scores[self._in_prompt | in_output] = seen
        scores -= self._frequency * self._output_counts
        scores -= self._presence * in_output
        return scores


class BadWords:
    """Forbids the last token of a sequence of tokens where the output ends with the others.

    Args:
        words: token sequences, none empty.
    """

    def __init__(self, words: Seq[Seq[int]]) -> None:
        self._words = [list(word) for word in words]
        self._longest_prefix = max(len(word) for word in words) - 1
        self._tail: list[int] = []

    def reset(self, prompt_token_ids: Seq[int]) -> None:
        self._tail = []

    def accept(self, token_id: int) -> None:
        self._tail.append(token_id)
        del self._tail[: max(0, len(self._tail) - self._longest_prefix)]

    def process(self, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        for *prefix, last in self._words:
            if self._tail[len(self._tail) - len(prefix) :] == prefix:
                scores[last] = -math.inf
        return scores


def tokenize_bad_words(words: Seq[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Token sequences of bad words: each as it stands at the start of a text and after a space.

    The form after a space is added where it has as many tokens and another first one: then it is
    another spelling of the same word. (vLLM's rule.)

    Raises:
        InfeasibleRequestError: the tokenizer cannot write a word.
    """
    sequences: list[list[int]] = []
    for word in words:
        plain = tokenizer.encode_plain(word.lstrip())
        sequences.append(plain)
        try:
            spaced = tokenizer.encode_plain(" " + word.lstrip())
        except InfeasibleRequestError:  # an alphabet without a space
            continue
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            sequences.append(spaced)
    return sequences
