"""Log probabilities of rows of logits: for reports, and for teacher-forced scoring.

Owns reading a row, ranking it, and its log-softmax; all in float64, one row at a time, so a result
depends on nothing but the row. Must never know how tokens are chosen. NumPy is imported when a row
is read, not before.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from preempt_engine.errors import NonFiniteLogitsError
from preempt_engine.outputs import TokenScore
from preempt_engine.step import LogitsBatch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def read_row(logits: LogitsBatch, index: int) -> NDArray[np.float64]:
    """One row of logits, float64 [vocab_size], the caller's own.

    Raises:
        NonFiniteLogitsError: the row holds NaN or an infinity; no choice from it has a meaning.
    """
    import numpy as np

    row = logits.row(index).astype(np.float64)
    finite = np.isfinite(row)
    if not finite.all():
        first = int(np.argmin(finite))
        raise NonFiniteLogitsError(
            f"{row.size - int(finite.sum())} of the {row.size} logits of row {index} are not "
            f"finite; the first is {row[first]} of token {first}.",
            "Check the weights, or use a wider dtype: float16 overflows at 65,504.",
        )
    return row


def largest_ids(scores: NDArray[np.float64], num: int) -> NDArray[np.intp]:
    """Ids of the `num` largest scores, in rising order of id; the lower id wins a tie.

    Args:
        scores: [vocab_size], without NaN.
        num: how many; more than there are gives all.
    """
    import numpy as np

    if num >= scores.size:
        return np.arange(scores.size)
    if num == 0:
        return np.empty(0, dtype=np.intp)
    threshold = np.partition(scores, scores.size - num)[scores.size - num]
    kept = scores > threshold
    kept[np.flatnonzero(scores == threshold)[: num - np.count_nonzero(kept)]] = True
    return np.flatnonzero(kept)


def log_softmax(row: NDArray[np.float64]) -> NDArray[np.float64]:
    """Log probabilities of a row of finite logits, same shape."""
    import numpy as np

    shifted: NDArray[np.float64] = row - row.max()
    shifted -= np.log(np.exp(shifted).sum())
    return shifted


def top_logprobs(row: NDArray[np.float64], num: int, chosen: int) -> dict[int, float]:
    """What a user sees of one position.

    Args:
        row: the model's own logits, [vocab_size]: no temperature, no filter, no ban.
        num: how many of the most likely tokens to report beside the chosen one.
        chosen: id of the chosen token.

    Returns:
        {token id: log probability}: the chosen token first, then the `num` most likely in order.
        The chosen token is not repeated, so there are `num` or `num` + 1 entries.
    """
    logprobs = log_softmax(row)
    ids = [chosen, *_most_likely(row, num)]
    return {token_id: float(logprobs[token_id]) for token_id in ids}


def _most_likely(row: NDArray[np.float64], num: int) -> list[int]:
    """Ids of the `num` largest, largest first; the lower id first in a tie."""
    import numpy as np

    ids = largest_ids(row, num)
    ordered: list[int] = ids[np.argsort(-row[ids], kind="stable")].tolist()
    return ordered


def top_logprobs_of_rows(
    logits: LogitsBatch, rows: Seq[int], num: int, token_ids: Seq[int]
) -> list[dict[int, float]]:
    """`top_logprobs` of given tokens, for example a prompt's.

    Args:
        logits: of one step.
        rows: row that predicts each token.
        num: how many of the most likely tokens to report beside the given one.
        token_ids: the tokens, one per row.

    Raises:
        NonFiniteLogitsError: a row holds NaN or an infinity.
    """
    return [
        top_logprobs(read_row(logits, row), num, token_id)
        for row, token_id in zip(rows, token_ids, strict=True)
    ]


def score_rows(logits: LogitsBatch, rows: Seq[int], token_ids: Seq[int]) -> list[TokenScore]:
    """Score given tokens against the rows that predict them (teacher forcing).

    Args:
        logits: of one step, a vocabulary of at least two tokens.
        rows: row that predicts each token.
        token_ids: the tokens to score, one per row.

    Raises:
        NonFiniteLogitsError: a row holds NaN or an infinity.
    """
    return [
        _score(read_row(logits, row), token_id)
        for row, token_id in zip(rows, token_ids, strict=True)
    ]


def _score(row: NDArray[np.float64], token_id: int) -> TokenScore:
    assert 0 <= token_id < row.size, f"token {token_id} is not in a vocabulary of {row.size}"
    logprobs = log_softmax(row)
    top, second = _most_likely(row, 2)
    return TokenScore(
        token_id=token_id,
        logprob=float(logprobs[token_id]),
        top_token_id=top,
        top_logprob=float(logprobs[top]),
        second_logprob=float(logprobs[second]),
    )
