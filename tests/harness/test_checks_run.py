"""Running the checks, and the documents that explain them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from fake_engine import run_fake
from fake_trials import make_workload

from preempt_harness.checks import CHECK_NAMES, Code, run_checks
from preempt_harness.checks.finding import Finding, Listing
from preempt_harness.checks.run import PARTS
from preempt_harness.record import RecordFormatError, event_names

DOCS = Path(__file__).parents[2] / "docs"


def test_every_check_runs_on_a_record_that_shows_everything() -> None:
    report = run_checks(run_fake(make_workload([5, 9], max_tokens=6), num_blocks=8))
    assert {result.check for result in report.results} == set(CHECK_NAMES)
    assert report.findings == ()
    assert report.not_observable == {}


def test_engine_that_shows_nothing_is_not_observable_part_by_part() -> None:
    record = run_fake(make_workload([5], max_tokens=3))
    record.header = msgspec.structs.replace(record.header, observed=[])
    record.baseline = None
    report = run_checks(record)
    silent = {result.name for result in report.results} - set(report.not_observable)
    assert silent == {"crash", "delivery/results", "progress/ends"}


def test_chosen_checks_only() -> None:
    record = run_fake(make_workload([5], max_tokens=3))
    assert {result.check for result in run_checks(record, ["kvsan"]).results} == {"kvsan"}


def test_unknown_check_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown checks: kvsam; known: crash, kvsan"):
        run_checks(run_fake(make_workload([5], max_tokens=3)), ["kvsam"])


def test_log_whose_workload_is_none_is_refused_by_name() -> None:
    record = run_fake(make_workload([5], max_tokens=3))
    record.header = msgspec.structs.replace(record.header, workload={"prompts": []})
    with pytest.raises(RecordFormatError, match="workload cannot be read"):
        run_checks(record)


def test_parts_need_event_types_that_exist() -> None:
    assert {name for part in PARTS for name in part.needs} <= event_names()


def test_part_names_are_unique() -> None:
    names = [(part.check, part.part) for part in PARTS]
    assert len(names) == len(set(names))


def test_same_root_cause_is_listed_once() -> None:
    listing = Listing()
    finding = Finding(code=Code.KVSAN_LEAK, message="one")
    assert listing.add(finding, once="r0")
    assert not listing.add(finding, once="r0")
    assert listing.add(finding, once="r1")
    assert len(listing.findings) == 2


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({"step": 3, "seq": "r0.1"}, "Step 3, r0.1: it happened."),
        ({"step": None, "request": "r0"}, "r0: it happened."),
        ({"step": 3}, "Step 3: it happened."),
        ({"step": None}, "It happened."),
    ],
)
def test_messages_say_where(place: dict[str, object], message: str) -> None:
    listing = Listing()
    listing.report(Code.KVSAN_LEAK, what="it happened", **place)  # type: ignore[arg-type]
    assert listing.findings[0].message == message


def test_findings_document_explains_every_code_and_no_other() -> None:
    text = (DOCS / "findings.md").read_text()
    sections = re.split(r"^### ", text, flags=re.MULTILINE)[1:]
    documented = [section.split("\n", 1)[0] for section in sections]
    assert sorted(documented) == sorted(code.value for code in Code)
    for section in sections:
        for part in ("Meaning:", "Example:", "Typical cause:"):
            assert part in section, section.split("\n", 1)[0]


def test_every_code_belongs_to_the_check_it_names() -> None:
    prefixes = {"kvsan", "tok", "del", "acc", "prog", "work", "crash"}
    assert {code.value.split("-")[0].lower() for code in Code} == prefixes


def test_kvsan_without_the_schedulers_view_says_so_and_judges_contents() -> None:
    record = run_fake(make_workload([6, 9, 7], max_tokens=12), num_blocks=8)
    hidden = {"BlocksAllocated", "BlocksFreed"}
    observed = [name for name in record.header.observed if name not in hidden]
    record.header = msgspec.structs.replace(record.header, observed=observed)
    report = run_checks(record, ["kvsan"])
    assert report.findings == ()
    assert report.not_observable == {
        "kvsan/ownership": "fake does not show BlocksAllocated, BlocksFreed"
    }
    assert report.counted["kvsan/contents: rows judged"] > 0


def test_checks_load_neither_torch_nor_an_engine() -> None:
    program = (
        "import sys, preempt_harness.checks, preempt_harness.situations; "
        "sys.exit(bool({'torch', 'numpy', 'preempt_engine'} & set(sys.modules)))"
    )
    root = str(Path(__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", program], cwd=root, check=False)
    assert done.returncode == 0
