"""A failure as a readable file, and strategy "replay", which runs the trials of such files.

The file is JSON: a format version, what was found, and the whole trial in plain fields. Nothing is
generated again, so it repeats after generators, seeds and defaults have changed; and a person can
read it, and change a number to try something.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from preempt_harness.explore.search import Failure, SearchOutcome, TrialRunner, search
from preempt_harness.explore.strategy import SearchTask
from preempt_harness.replay import ReplayError
from preempt_harness.trial import Trial

FORMAT_VERSION = 1
_READABLE_VERSIONS = frozenset({1})


class ReplayFile(msgspec.Struct, frozen=True, kw_only=True):
    """What the file holds.

    Attributes:
        preempt_replay: version of the format.
        expected: finding codes of the trial when the file was written, the first finding first.
        message: the first finding.
        command: what to run.
        trial: engine, settings, workload, plan.
    """

    preempt_replay: int
    expected: tuple[str, ...]
    message: str
    command: str
    trial: Trial


def write(failure: Failure, path: Path) -> None:
    """Write a failure; an existing file is replaced.

    Raises:
        OSError: the file cannot be written.
    """
    content = ReplayFile(
        preempt_replay=FORMAT_VERSION,
        expected=failure.codes,
        message=failure.message,
        command=f"preempt-harness replay {path}",
        trial=failure.trial,
    )
    path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")


def read(path: Path) -> ReplayFile:
    """Read a file.

    Raises:
        ReplayError: it cannot be read, is no replay file, or is of a version that is not known.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ReplayError(f"{path} cannot be read ({error}).", "Give a replay file.") from error
    return parse(data, str(path))


def parse(data: bytes, name: str) -> ReplayFile:
    """Read the content of a file.

    Args:
        data: the content.
        name: of the file, for messages.

    Raises:
        ReplayError: it is no replay file, or of a version that is not known.
    """
    try:
        plain = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise ReplayError(f"{name} is no JSON ({error}).", "Give a replay file.") from error
    version = plain.get("preempt_replay") if isinstance(plain, dict) else None
    if version not in _READABLE_VERSIONS:
        raise ReplayError(
            f"{name} is of replay format version {version!r}; this release reads "
            f"{', '.join(map(str, sorted(_READABLE_VERSIONS)))}.",
            "Use the release of the harness that wrote it.",
        )
    try:
        return msgspec.convert(plain, ReplayFile)
    except msgspec.ValidationError as error:
        raise ReplayError(
            f"{name} is a damaged replay file ({error}).", "Write it anew, or mend that field."
        ) from error


@dataclass(frozen=True)
class Replay:
    """Strategy "replay": the trials of files, in order.

    Args:
        paths: replay files.
    """

    paths: Sequence[Path] = ()

    name = "replay"

    def explore(self, runner: TrialRunner, task: SearchTask) -> SearchOutcome:
        """Run each file's trial until one fails.

        Raises:
            ReplayError: a file cannot be read.
        """
        trials = [read(path).trial for path in self.paths]
        return search(trials, runner, max_trials=task.max_trials, max_cpu_s=task.max_cpu_s)
