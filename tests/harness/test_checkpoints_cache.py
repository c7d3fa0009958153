"""The checkpoint cache never hands out a folder that is partial or damaged."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from preempt_harness.checkpoints.cache import CACHE_VARIABLE, cache_root, cached_folder, is_intact

NAME = "some-checkpoint"
WEIGHTS = "weights.bin"


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "cache"
    monkeypatch.setenv(CACHE_VARIABLE, str(root))
    return root


def write_weights(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"weights" * 100)


def log_and_write(log: Path, folder: Path) -> None:
    with log.open("a") as file:
        file.write("built\n")
    write_weights(folder)


def build_logged(log: Path) -> Path:
    return cached_folder(NAME, partial(log_and_write, log))


def test_the_variable_wins_over_the_xdg_folder(root: Path) -> None:
    assert cache_root() == root


def test_the_xdg_folder_is_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "preempt-harness"


def test_a_relative_xdg_folder_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_root() == Path.home() / ".cache" / "preempt-harness"


def test_a_second_call_builds_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert build_logged(log) == build_logged(log)
    assert log.read_text() == "built\n"


def test_processes_that_ask_at_once_build_once_and_all_get_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        folders = pool.map(build_logged, [log] * 8)
    assert log.read_text() == "built\n"
    assert len(set(folders)) == 1
    assert is_intact(folders[0])


def test_an_interrupted_build_leaves_nothing_and_the_next_one_succeeds(root: Path) -> None:
    def interrupted(folder: Path) -> None:
        write_weights(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_folder(NAME, interrupted)
    assert [path for path in root.iterdir() if path.is_dir()] == []
    assert is_intact(cached_folder(NAME, write_weights))


def test_what_a_killed_build_left_is_removed(root: Path) -> None:
    leftover = root / f"{NAME}.partial-killed"
    leftover.mkdir(parents=True)
    write_weights(leftover)
    cached_folder(NAME, write_weights)
    assert not leftover.exists()


def truncate(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-1])


def flip_a_bit(folder: Path) -> None:
    content = bytearray((folder / WEIGHTS).read_bytes())
    content[3] ^= 1
    (folder / WEIGHTS).write_bytes(content)


def remove_a_file(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def remove_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def truncate_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"weights')


@pytest.mark.parametrize(
    "damage", [truncate, flip_a_bit, remove_a_file, remove_the_manifest, truncate_the_manifest]
)
def test_a_damaged_folder_is_built_again(damage: Callable[[Path], None]) -> None:
    folder = cached_folder(NAME, write_weights)
    whole = (folder / WEIGHTS).read_bytes()
    damage(folder)
    assert not is_intact(folder)
    assert (cached_folder(NAME, write_weights) / WEIGHTS).read_bytes() == whole
    assert is_intact(folder)
