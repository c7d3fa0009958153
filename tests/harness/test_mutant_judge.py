"""Mutants judged in forked children: what is found, what is not, and what a fork cannot show."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from benchmarks.mutant_judge import Change, Group, Job, Verdict, new_codes
from benchmarks.mutation import TARGETS

MODULE = """\
LIMIT = 3


def double(number, factor=2):
    return number * factor


class Counter:
    start = 0

    def __init__(self):
        self.count = self.start

    @property
    def is_full(self):
        return self.count >= LIMIT

    @classmethod
    def full(cls):
        made = cls()
        while not made.is_full:
            made.count += 1
        return made


def apply(numbers):
    def again(number):
        return double(number) + 1

    return [again(number) for number in numbers]


def untested(number):
    return number + 1
"""
TESTS = """\
from module import Counter, apply, double


def test_double():
    assert double(4) == 8


def test_full():
    assert Counter.full().count == 3


def test_apply():
    assert apply([1, 2]) == [3, 5]
"""


@pytest.fixture
def module(tmp_path: Path) -> ModuleType:
    path = tmp_path / "module.py"
    path.write_text(MODULE)
    spec = importlib.util.spec_from_file_location("module_under_change", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("number * factor", "number + factor", ("double", 6)),
        (">= LIMIT", "> LIMIT", ("is_full", 4)),
        ("made.count += 1", "made.count += 2", ("full", 4)),
        ("double(number) + 1", "double(number) - 1", ("apply", [7])),
    ],
)
def test_a_changed_function_runs_its_changed_code(
    module: ModuleType, before: str, after: str, expected: tuple[str, object]
) -> None:
    codes = new_codes(MODULE, MODULE.replace(before, after), str(module.__file__))
    assert codes is not None
    assert len(codes) == 1
    for function, code in codes:
        function.__code__ = code
    results = {
        "double": module.double(4),
        "full": module.Counter.full().count,
        "is_full": module.Counter.full().count,
        "apply": module.apply([4]),
    }
    name, value = expected
    assert results[name] == value


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("LIMIT = 3", "LIMIT = 4"),
        ("factor=2", "factor=3"),
        ("start = 0", "start = 1"),
        ("    @property\n", ""),
        ("number * factor", "number *"),
    ],
)
def test_what_is_done_at_import_needs_a_new_process(
    module: ModuleType, before: str, after: str
) -> None:
    assert new_codes(MODULE, MODULE.replace(before, after), str(module.__file__)) is None


def test_verdicts(tmp_path: Path) -> None:
    """Of changes in functions and outside; the file is in the end as it was."""
    (tmp_path / "module.py").write_text(MODULE)
    (tmp_path / "test_module.py").write_text(TESTS)
    changes = (
        ("number * factor", "number - factor"),
        ("number + 1", "number - 1"),
        (">= LIMIT", "> LIMIT"),
        ("made.count += 1", "made.count -= 1"),
        ("start = 0", "start = undefined"),
        ("number * factor", "len(bytearray(2**33)) and number * factor"),  # more than it may have
    )
    job = Job(
        groups=[Group("tests", ["test_module.py"])],
        changes=[Change("module.py", MODULE.replace(*change)) for change in changes],
        arguments=["-W", "ignore"],
        verdicts=str(tmp_path / "verdicts"),
        slack_s=0.5,
    )
    (tmp_path / "job").write_bytes(msgspec.json.encode(job))
    root = Path(__file__).parents[2]
    path = os.pathsep.join(map(str, (tmp_path, root, root / "engine")))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.mutant_judge", str(tmp_path / "job")],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "verdicts").read_bytes().splitlines()
    verdicts = [msgspec.json.decode(line, type=Verdict) for line in lines]
    assert [verdict.outcome for verdict in verdicts] == [
        "killed",
        "survived",
        "killed",
        "timeout",
        "killed",
        "killed",
    ]
    groups = [verdict.group for verdict in verdicts]
    assert groups == ["tests", "", "tests", "tests", "import", "tests"]
    assert verdicts[2].test == verdicts[3].test == "test_module.py::test_full"
    assert (tmp_path / "module.py").read_text() == MODULE


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_names_files_that_are_there_each_once(name: str) -> None:
    target = TARGETS[name]
    for paths in (target.modules, target.tests):
        assert paths
        assert all(Path(path).is_file() for path in paths)
    assert len(set(target.modules)) == len(target.modules)


def test_no_module_is_of_two_targets() -> None:
    modules = [module for target in TARGETS.values() for module in target.modules]
    assert len(set(modules)) == len(modules)
