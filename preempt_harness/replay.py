"""A trial as one paste-able string, and back.

The string holds the whole trial (engine, settings, workload, plan): nothing is generated again, so
it repeats after generators, seeds and defaults have changed. Plain data; nothing is evaluated.
"""

from __future__ import annotations

import base64
import binascii
import zlib

import msgspec

from preempt_harness.errors import HarnessError
from preempt_harness.trial import Trial

PREFIX = "preempt1:"
_MAX_BYTES = 64 * 2**20


class ReplayError(HarnessError, ValueError):
    """A replay string is damaged, or of a version that this release does not read."""


def encode(trial: Trial) -> str:
    """The trial as letters, digits, "-", "_", "=" after a version prefix."""
    packed = zlib.compress(msgspec.json.encode(trial), level=9)
    return PREFIX + base64.urlsafe_b64encode(packed).decode("ascii")


def decode(text: str) -> Trial:
    """Inverse of `encode`.

    Raises:
        ReplayError: the string is cut, damaged, or of another version.
    """
    text = text.strip()
    if not text.startswith(PREFIX):
        raise ReplayError(
            f"{text[:24]!r} does not begin with {PREFIX!r}.",
            "Paste the whole string that the failure printed, with this release of the harness.",
        )
    try:
        packed = base64.b64decode(text.removeprefix(PREFIX), altchars=b"-_", validate=True)
        plain = zlib.decompressobj().decompress(packed, _MAX_BYTES)
        return msgspec.json.decode(plain, type=Trial)
    except (binascii.Error, zlib.error, msgspec.DecodeError) as error:
        raise ReplayError(
            f"The replay string is damaged ({error}).", "Paste it whole, without line breaks."
        ) from error
