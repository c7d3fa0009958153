"""What a sequence's own tokens are, and the chain values that its slots should therefore hold.

Tokens of the prompt and tokens that were delivered are *known*. A worker may compute beyond them:
the next token before its delivery (asynchronous scheduling), or drafts that are never delivered.
Those are provisional: taken as the sequence's own until the real token arrives and is compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from preempt_harness.checks.chain import extend, extend_by, root


class OwnTokens:
    """One sequence's own tokens, as one rank has been given them.

    Args:
        known: prompt and delivered tokens so far.
        salt: of the chain.

    Attributes:
        ids: own token ids, [num_tokens]; the first `num_known` are known, the rest provisional.
        values: chain values of the same positions.
    """

    __slots__ = ("_root", "ids", "num_known", "values")

    def __init__(self, known: Iterable[int], salt: int = 0) -> None:
        self._root = root(salt)
        self.ids: list[int] = []
        self.values: list[int] = []
        self.num_known = 0
        self.deliver(list(known))

    def deliver(self, token_ids: Sequence[int]) -> int | None:
        """The next real tokens.

        Returns:
            The first position whose provisional token was another one, or None.
        """
        ids, values = self.ids, self.values
        if self.num_known == len(ids):  # none is provisional
            values += extend_by(values[-1] if values else self._root, token_ids, len(ids))
            ids += token_ids
            self.num_known = len(ids)
            return None
        changed = None
        for token_id in token_ids:
            position = self.num_known
            if position < len(ids) and ids[position] != token_id:
                changed = position
                self._cut(position)
            if position == len(ids):
                values.append(extend(values[-1] if values else self._root, token_id, position))
                ids.append(token_id)
            self.num_known = position + 1
        return changed

    def propose(self, position: int, token_id: int) -> bool:
        """A worker computes `token_id` at `position`.

        Returns:
            False when the position's own token is known and is another one.
        """
        if position < self.num_known:
            return self.ids[position] == token_id
        if position < len(self.ids) and self.ids[position] != token_id:
            self._cut(position)
        while len(self.ids) < position:  # positions nobody ever told of: KVSan reports the gap
            self._append(-1)
        if position == len(self.ids):
            self._append(token_id)
        return True

    def value_before(self, position: int) -> int:
        """What the slot before one of its positions should hold; the root before the first."""
        return self.values[position - 1] if position else self._root

    def forget_provisional(self) -> None:
        """Keep the known tokens only."""
        self._cut(self.num_known)

    def _append(self, token_id: int) -> None:
        previous = self.values[-1] if self.values else self._root
        self.values.append(extend(previous, token_id, len(self.ids)))
        self.ids.append(token_id)

    def _cut(self, length: int) -> None:
        del self.ids[length:]
        del self.values[length:]
