"""Where prompt tokens come from: fresh ids of a wanted length, random or from real text.

Knows no engine: an adapter's `encode` is handed in.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import cycle

_FIRST_ORDINARY_ID = 4  # lower ids are often special: padding, begin, end, unknown


class PromptSource:
    """Gives token lists that begin differently each time, so that they share no prefix by chance.

    Args:
        vocab_size: ids are drawn from [4, vocab_size).
        seed: of the draws.
        encode: turns real text into ids; None draws random ids.
    """

    def __init__(
        self, vocab_size: int, seed: int, encode: Callable[[str], list[int] | None] | None = None
    ) -> None:
        self._random = random.Random(seed)
        self._vocab_size = vocab_size
        self._encode = encode
        self._texts: Iterator[str] = cycle(TEXTS)
        self._texts_taken: dict[tuple[int, ...], str] = {}
        self._num_taken = 0

    def take(self, num_tokens: int) -> list[int]:
        """`num_tokens` ids; real text is cut, or continued with the next text, to fit."""
        self._num_taken += 1
        if self._encode is None:
            return [self._ordinary_id() for _ in range(num_tokens)]
        ids: list[int] = []
        texts: list[str] = []
        round_number, _ = divmod(self._num_taken - 1, len(TEXTS))
        # A second round over the texts begins differently, so that it shares no prefix.
        opening = f"({round_number + 1}) " if round_number else ""
        while len(ids) < num_tokens:
            text = opening + next(self._texts) + "\n"
            encoded = self._encode(text)
            assert encoded, "the encoder gave no ids for a text"
            ids += encoded
            texts.append(text)
            opening = ""
        self._texts_taken[tuple(ids[:num_tokens])] = "".join(texts)
        return ids[:num_tokens]

    def text_of(self, token_ids: list[int]) -> str:
        """The text from which a list was taken, "" for random ids."""
        return self._texts_taken.get(tuple(token_ids), "")

    def _ordinary_id(self) -> int:
        return self._random.randrange(_FIRST_ORDINARY_ID, self._vocab_size)


TEXTS = (
    "Write a short note to a neighbour who is away, explaining that the parcel left at the door "
    "has been taken inside and where the key can be found on Saturday morning.",
    "The harbour town had three bakeries, and every spring their owners argued about who first "
    "put fennel seeds into the bread. The oldest of them kept a ledger which, she said,",
    "List the steps for repairing a flat bicycle tyre at the side of the road with one patch, a "
    "small pump and no running water. Be precise about the order.",
    "def merge_intervals(intervals):\n    # Sort by start, then join each interval with the last "
    "one that it touches.\n    result = []\n    for start, end in sorted(intervals):",
    "Explain to a ten year old why the moon looks larger near the horizon although its distance "
    "from us has hardly changed. Use one example from a kitchen.",
    "Minutes of the meeting of the garden society, 14 March. Present: eleven members. The "
    "treasurer reported that the new greenhouse had cost less than planned, because",
    "Translate into French and keep the tone polite: we are sorry to hear that the second lamp "
    "arrived broken, and would like to send another one at once.",
    "Question: a train leaves at 9:40 and travels 210 kilometres at 84 kilometres an hour. When "
    "does it arrive? Think aloud and check the result at the end.",
    "Once the snow had gone, the surveyors found that the old boundary stones had moved downhill "
    "by almost a metre, which led to a question nobody in the valley had asked before:",
    "Compare two ways of storing a sparse matrix, by rows and by coordinates. Which of them is "
    "better for adding single entries, and which for multiplying with a vector?",
    "Dear editor, your article on tide tables was excellent, but it repeats one mistake that I "
    "have now met in four books. The highest tide does not",
    "Recipe for four people: peel a kilogram of quinces, keep the cores in a cloth bag, and cover "
    "everything with water. While it simmers, prepare",
)
