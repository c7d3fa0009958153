"""Output token ids to text, one token at a time, and the stop strings in that text.

Owns, per sequence, the text so far. Its state is a pure function of the token ids pushed: pushing
the same ids into a fresh object gives an equal one, so nothing has to be saved across a preemption.
Must never know requests, steps or why a sequence ends otherwise.

Text that was returned never changes. Two kinds of text are therefore held back: bytes that may
still become a character (`TextDecoder`), and characters that may still become a stop string
(`StopStringSearch`).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import KW_ONLY, dataclass, field

from preempt_engine.tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# A UTF-8 character has at most 4 bytes, and every token that is not skipped has at least one. So
# the 4th token since a character was last complete proves that bytes are invalid or that tokens
# straddle characters; and at most 3 bytes, 3 replacement characters, can still be completed.
_MAX_CHARACTER_BYTES = 4
_MAX_INCOMPLETE = _MAX_CHARACTER_BYTES - 1

# While no character is complete the window is cut from _MAX_WINDOW to _MIN_WINDOW tokens. The 3
# replacement characters held back stand for at most 9 bytes, and the cut can change how the first
# 3 bytes behind it decode: 12 tokens are enough to keep the two apart.
_MIN_WINDOW = _MAX_INCOMPLETE * _MAX_INCOMPLETE + _MAX_INCOMPLETE
_MAX_WINDOW = 2 * _MIN_WINDOW


@dataclass(slots=True)
class TextDecoder:
    """Decodes a stream of token ids at a cost per token that does not depend on its length.

    Only a short window is decoded, never the whole output: the tokens that gave the last complete
    text, as context (a tokenizer may treat the first token of a text differently), and the tokens
    after them.

        window    | context: text returned | pending |
        decoded   |<---- num_returned ---->|         |

    Source: the prefix and read offsets of text-generation-inference, `Model.decode_token` in
    server/text_generation_server/models/model.py
    (https://github.com/huggingface/text-generation-inference). In addition the window is bounded
    where tokens never complete a character, which models with random weights do all the time.

    With a byte-level tokenizer the pieces concatenate to `tokenizer.decode(all ids)` for any ids.
    With byte fallback (a whole run of byte tokens decodes at once) they do for ids that encode
    valid text.

    Args:
        tokenizer: of the model.
    """

    tokenizer: Tokenizer
    _window: list[int] = field(default_factory=list, init=False)
    _num_context: int = field(default=0, init=False)
    _num_returned: int = field(default=0, init=False)

    def push(self, token_id: int) -> str:
        """Take in one token; return the text that is now final."""
        if self.tokenizer.is_skipped(token_id):
            return ""
        self._window.append(token_id)
        text = self.tokenizer.decode(self._window)
        if text.endswith(_REPLACEMENT):
            return self._push_incomplete(text)
        new_text = text[self._num_returned :]
        del self._window[: self._num_context]
        self._num_context = len(self._window)
        self._num_returned = len(self.tokenizer.decode(self._window))
        return new_text

    def _push_incomplete(self, text: str) -> str:
        if len(self._window) - self._num_context < _MAX_CHARACTER_BYTES:
            return ""
        num_incomplete = min(_MAX_INCOMPLETE, len(text) - len(text.rstrip(_REPLACEMENT)))
        num_final = max(self._num_returned, len(text) - num_incomplete)
        new_text = text[self._num_returned : num_final]
        self._num_returned = num_final
        if len(self._window) >= _MAX_WINDOW:
            num_held = len(text) - num_final
            del self._window[:-_MIN_WINDOW]
            self._num_context = 0
            self._num_returned = len(self.tokenizer.decode(self._window)) - num_held
        return new_text

    def flush(self) -> str:
        """The text of what is held back, incomplete characters as U+FFFD; ends the stream."""
        text = self.tokenizer.decode(self._window)
        new_text = text[self._num_returned :]
        self._num_returned = len(text)
        return new_text


@dataclass(slots=True)
class StopStringSearch:
    """Finds the first stop string in a text that arrives in pieces.

    The first is the one that ends first, and of those that end together the longest: what a reader
    sees who gets the text character by character, so the result does not depend on the pieces.
    Everything a match could begin with is held back; so a match never begins in returned text, and
    the text held back, shorter than the longest stop string, is all there is to search.

    Args:
        stop: the stop strings, none empty.
    """

    stop: Seq[str]
    matched: str | None = field(default=None, init=False)
    _held: str = field(default="", init=False)

    def push(self, new_text: str, *, may_stop: bool) -> str:
        """Take in text; return what is now final, cut before the stop string if one matched.

        Args:
            new_text: follows the text pushed before.
            may_stop: a stop string may end in `new_text`; else it only may begin there.
        """
        assert self.matched is None, f"text after the stop string {self.matched!r}"
        text = self._held + new_text
        start = self._find(text, len(self._held)) if may_stop else None
        if start is not None:
            self._held = ""
            return text[:start]
        num_final = len(text) - self._num_possible(text)
        self._held = text[num_final:]
        return text[:num_final]

    def flush(self) -> str:
        """The text held back; ends the stream."""
        text, self._held = self._held, ""
        return text

    def _find(self, text: str, searched: int) -> int | None:
        """Set `matched` to the first stop string that ends after `searched`; return its start."""
        first: tuple[int, int] | None = None
        for stop in self.stop:
            start = text.find(stop, max(0, searched - len(stop) + 1))
            if start >= 0 and (first is None or (start + len(stop), start) < first):
                first = (start + len(stop), start)
                self.matched = stop
        return None if first is None else first[1]

    def _num_possible(self, text: str) -> int:
        """Length of the longest end of `text` that is a beginning, not all, of a stop string."""
        longest = max((len(stop) for stop in self.stop), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            end = text[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self.stop):
                return length
        return 0


@dataclass(slots=True)
class IncrementalDetokenizer:
    """Text of one sequence's output, and the stop string that ends it.

    Args:
        tokenizer: of the model.
        stop: `SamplingParams.stop`.
        min_tokens: `SamplingParams.min_tokens`; only a later token can complete a stop string.

    Attributes:
        num_tokens: how many tokens were pushed.
    """

    tokenizer: Tokenizer
    _: KW_ONLY
    stop: Seq[str] = ()
    min_tokens: int = 0
    num_tokens: int = field(default=0, init=False)
    _decoder: TextDecoder = field(init=False)
    _search: StopStringSearch = field(init=False)
    _pieces: list[str] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._decoder = TextDecoder(self.tokenizer)
        self._search = StopStringSearch(self.stop)

    @property
    def stop_reason(self) -> str | None:
        """The stop string that was found; the sequence ends with the token pushed last."""
        return self._search.matched

    @property
    def text(self) -> str:
        """All text returned so far. Cost in proportion to its length: not for every step."""
        return "".join(self._pieces)

    def push(self, token_id: int) -> str:
        """Take in one output token; return the text that is now final, often "".

        A stop *token* that ends a sequence has no text: do not push it, call `finish`.
        """
        self.num_tokens += 1
        return self._append(self._decoder.push(token_id))

    def finish(self) -> str:
        """Return the text still held back. Call once, when the sequence ends for any reason.

        `stop_reason` may change: U+FFFD for bytes that remained incomplete may complete a stop
        string.
        """
        if self.stop_reason is not None:
            return ""
        new_text = self._append(self._decoder.flush())
        if self.stop_reason is None:
            held = self._search.flush()
            self._pieces.append(held)
            new_text += held
        return new_text

    def _append(self, decoded: str) -> str:
        new_text = self._search.push(decoded, may_stop=self.num_tokens > self.min_tokens)
        if new_text:
            self._pieces.append(new_text)
        return new_text
