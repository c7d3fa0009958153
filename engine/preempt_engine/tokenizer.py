"""Text to token ids and back.

Owns what the engine needs of a tokenizer (`Tokenizer`) and its two implementations: a Hugging Face
directory and the exact model's one-character alphabet. Must never know requests; never runs code
that a checkpoint brings, never asks the network.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import count, islice
from pathlib import Path
from typing import Any, Protocol

from preempt_engine.errors import InfeasibleRequestError, ModelNotFoundError


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of ids; the model's own vocabulary may be larger (padding)."""
        ...

    @property
    def eos_token_id(self) -> int | None:
        """The end-of-sequence token, if there is one."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, with the special tokens that the tokenizer puts around it."""
        ...

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a piece of text, without the special tokens of a prompt."""
        ...

    def decode(self, token_ids: Seq[int]) -> str:
        """Text of the ids, special tokens left out; U+FFFD stands for bytes that are no UTF-8."""
        ...

    def is_skipped(self, token_id: int) -> bool:
        """True when `decode` leaves the id out: a special token, or no token at all."""
        ...


class HFTokenizer:
    """The tokenizer of a local directory in Hugging Face format.

    Args:
        directory: holds `tokenizer.json` or the files of another format that transformers reads.

    Raises:
        ModelNotFoundError: there is no such directory, or no usable tokenizer in it.
    """

    def __init__(self, directory: str | Path) -> None:
        self._tokenizer = _load(Path(directory))
        # Of the library "tokenizers", which cleans nothing up; None for a tokenizer in Python.
        self._fast = getattr(self._tokenizer, "backend_tokenizer", None)
        self._special_ids = frozenset(
            token_id
            for token_id, token in self._tokenizer.added_tokens_decoder.items()
            if token.special
        )

    @property
    def transformers_tokenizer(self) -> Any:
        """The library's own object, for libraries that take nothing else."""
        return self._tokenizer

    @property
    def vocab_size(self) -> int:
        return len(self._tokenizer)

    @property
    def eos_token_id(self) -> int | None:
        eos_token_id: int | None = self._tokenizer.eos_token_id
        return eos_token_id

    def encode(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(text)
        return token_ids

    def encode_plain(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return token_ids

    def decode(self, token_ids: Seq[int]) -> str:
        if self._fast is not None:
            decoded: str = self._fast.decode(token_ids, skip_special_tokens=True)
            return decoded
        # Cleaning up spaces would change text that was already streamed.
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def is_skipped(self, token_id: int) -> bool:
        return (
            token_id in self._special_ids or self._tokenizer.convert_ids_to_tokens(token_id) is None
        )


_ADVICE = "Pass skip_tokenizer_init=True and prompts as token ids, or tokenizer=<a directory>."
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def _load(directory: Path) -> Any:
    if not directory.is_dir():
        raise ModelNotFoundError(f"The tokenizer directory {directory} does not exist.", _ADVICE)
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelNotFoundError(
            f"{directory} holds no tokenizer: none of {', '.join(_TOKENIZER_FILES)}.", _ADVICE
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # the readers raise whatever their parsers raise
        # The first line only: the rest may advise to run the checkpoint's own code.
        cause = str(error).strip().partition("\n")[0]
        raise ModelNotFoundError(
            f"The tokenizer in {directory} cannot be read ({type(error).__name__}: {cause}).",
            _ADVICE,
        ) from error


class ExactTokenizer:
    """The exact model's tokenizer: id i is the i-th visible character from "!" on.

    Args:
        vocab_size: number of ids, 32 to 256.
    """

    def __init__(self, vocab_size: int) -> None:
        assert 32 <= vocab_size <= 256, f"the exact model has no vocabulary of {vocab_size}"
        visible = filter(str.isprintable, map(chr, count(ord("!"))))
        self._characters = "".join(islice(visible, vocab_size))
        self._ids = {character: i for i, character in enumerate(self._characters)}

    @property
    def vocab_size(self) -> int:
        return len(self._characters)

    @property
    def eos_token_id(self) -> int | None:
        return None

    def encode(self, text: str) -> list[int]:
        """One id per character.

        Raises:
            InfeasibleRequestError: a character is none of the vocabulary's.
        """
        unknown = next((character for character in text if character not in self._ids), None)
        if unknown is not None:
            raise InfeasibleRequestError(
                f"The exact model's tokenizer has no character {unknown!r} (prompt index "
                f"{text.index(unknown)}).",
                f"Use the {self.vocab_size} characters {self._characters!r}, or pass token ids.",
            )
        return [self._ids[character] for character in text]

    def encode_plain(self, text: str) -> list[int]:
        """As `encode`: there are no special tokens."""
        return self.encode(text)

    def decode(self, token_ids: Seq[int]) -> str:
        assert all(0 <= token_id < self.vocab_size for token_id in token_ids), token_ids
        return "".join(self._characters[token_id] for token_id in token_ids)

    def is_skipped(self, token_id: int) -> bool:
        return False
