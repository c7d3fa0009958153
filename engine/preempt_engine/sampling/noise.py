"""Position-keyed noise: every random number of the engine is a pure function of its key.

Owns the mapping from (seed, branch, position, purpose) to noise, and from (engine seed, arrival
index) to a request's seed. Keeps no state, so nothing that happens to a request (preemption,
another batch, another order, a rejected draft) can move its random stream. Must never know
requests, logits or steps.

Source: the counter-based generator Philox4x64-10 of Salmon, Moraes, Dror and Shaw, "Parallel random
numbers: as easy as 1, 2, 3", SC 2011 (https://doi.org/10.1145/2063384.2063405). NumPy guarantees
that a fixed key always gives the same stream of raw integers
(https://numpy.org/doc/stable/reference/random/bit_generators/philox.html); it gives no such
guarantee for the distributions of `Generator`, so the conversion to floats is done here.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TOKEN_CHOICE = "token"
"""Purpose of the noise that chooses an output token."""


def uniform_noise(
    seed: int, branch: int, position: int, purpose: str, size: int
) -> NDArray[np.float64]:
    """Uniform noise on the open interval (0, 1).

    Args:
        seed: of the request; any integer.
        branch: index of the sequence within its request.
        position: absolute index, prompt included, of the token the noise is for.
        purpose: what the noise decides; each purpose has a stream of its own.
        size: how many numbers. A shorter draw is a prefix of a longer one.

    Returns:
        float64 [size]; neither 0 nor 1 occurs, so both logarithms of Gumbel noise are finite.
    """
    import numpy as np

    # Integers hold no ":", and the purpose stands last: different keys, different texts.
    text = f"{branch_seed(seed, branch)}:{position}:{purpose}".encode()
    digest = hashlib.blake2b(text, digest_size=16, person=b"preempt-noise").digest()
    raw = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(size)
    # The upper 52 bits, moved half a step off zero; every value is exact in float64.
    noise: NDArray[np.float64] = (raw >> np.uint64(12)).astype(np.float64)
    noise += 0.5
    noise *= 2.0**-52
    return noise


def gumbel(uniform: NDArray[np.float64]) -> NDArray[np.float64]:
    """Standard Gumbel noise, -log(-log(u)), of uniform noise on (0, 1); elementwise.

    The argmax of log probabilities plus this noise is a draw from their distribution: the
    Gumbel-max trick (Maddison, Tarlow and Minka, "A* Sampling", https://arxiv.org/abs/1411.0030,
    section 2).

    Returns:
        float64, same shape; from `uniform_noise` finite, in (-3.7, 36.8).
    """
    import numpy as np

    noise = -np.log(uniform)
    np.log(noise, out=noise)  # in place: vocabularies are long
    return np.negative(noise, out=noise)


def branch_seed(seed: int, branch: int) -> int:
    """Seed with which a request of its own would draw the noise of one branch of another.

    With `SamplingParams(n=...)`, branch `i` of a request with seed `s` gives the tokens of a
    request with `n=1` and seed `branch_seed(s, i)`.

    Args:
        seed: of the request; any integer.
        branch: index of the branch; branch 0 has the request's own seed.
    """
    if branch == 0:
        return seed
    text = f"{seed}:{branch}".encode()
    digest = hashlib.blake2b(text, digest_size=8, person=b"preempt-branch").digest()
    return int.from_bytes(digest, "little")


def derive_seed(engine_seed: int, arrival_index: int) -> int:
    """Seed of a request that brought none.

    Args:
        engine_seed: `EngineConfig.seed`.
        arrival_index: how many requests the engine had accepted before this one.

    Returns:
        An integer in [0, 2**64).
    """
    text = f"{engine_seed}:{arrival_index}".encode()
    digest = hashlib.blake2b(text, digest_size=8, person=b"preempt-seed").digest()
    return int.from_bytes(digest, "little")
