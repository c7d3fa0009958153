"""`preempt-harness stress`, and a script of another engine with only its import changed."""

from __future__ import annotations

import ast
import inspect
import re

import pytest

from benchmarks import seed_script
from preempt_harness.checkpoints import tiny_checkpoint
from preempt_harness.cli.main import main

SMALL = ["--num_seqs", "6", "--max_input_len", "24", "--max_output_len", "24"]


def figure(output: str, name: str) -> int:
    found = re.search(rf"^{name}: +(\d+)$", output, re.MULTILINE)
    assert found is not None, output
    return int(found[1])


def test_by_default_the_pool_is_solved_so_that_it_preempts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["stress"]) == 0
    output = capsys.readouterr().out
    assert figure(output, "preemptions") >= 1
    assert figure(output, "recomputed tokens") >= 16
    assert figure(output, "output tokens") == 32 * 128
    assert "output tokens/s" in output


def test_every_flag_is_understood(capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        "--model exact --tp 1 --num_seqs 5 --max_input_len 20 --min_input_len 20 "
        "--max_output_len 30 --temperature 0.6 --max_model_len 100 --vocab 32 --seed 3 "
        "--gpu_mem_util 0.5 --enforce_eager --num-kv-blocks 40 --block-size 4"
    )
    assert main(["stress", *flags.split()]) == 0
    output = capsys.readouterr().out
    assert figure(output, "prompt tokens") == 100
    assert figure(output, "output tokens") == 150
    assert figure(output, "preemptions") >= 1


def test_a_pool_with_room_fails_and_says_what_would_preempt(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["stress", *SMALL, "--num-kv-blocks", "500"]) == 1
    captured = capsys.readouterr()
    assert figure(captured.out, "preemptions") == 0
    assert re.search(r"nothing was preempted: .* \d+ blocks would preempt", captured.err)


def test_a_vocabulary_beyond_the_models_is_clamped_aloud(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["stress", *SMALL, "--vocab", "152064"]) == 0
    assert "--vocab 152064 is larger than the model's vocabulary" in capsys.readouterr().out


def test_outputs_cut_by_the_models_length_are_whole(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--min_input_len", "24", "--max_model_len", "40", "--num-kv-blocks", "10"]
    assert main(["stress", *SMALL, *arguments]) == 0
    assert figure(capsys.readouterr().out, "output tokens") == 6 * (40 - 24)


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["--min_input_len", "200"], "--max_input_len"),
        (["--max_model_len", "100"], "raise --max_model_len"),
        (["--num_seqs", "0"], "Give 1 or more"),
        (["--num_seqs", "1"], "Add requests"),
        (["--tp", "2"], "tensor_parallel_size=1"),
        (["--model", "/no/such/folder"], "hub id"),
        (["--model", "tiny-gpt7"], "Known:"),
        (["--temperature", "-1"], "temperature must be 0 or more"),
    ],
)
def test_bad_arguments_end_with_one_line_that_says_what_to_do(
    arguments: list[str], remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["stress", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("preempt-harness stress: ")
    assert error.count("\n") == 1
    assert remedy in error


def test_a_script_of_another_engine_runs_when_its_import_is_changed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    seed_script.main([str(tiny_checkpoint("llama")), "--num_seqs", "3", "--max_output_len", "8"])
    assert capsys.readouterr().out.startswith("3 outputs, 24 tokens, ")


def test_that_script_imports_nothing_of_this_project_but_two_names() -> None:
    tree = ast.parse(inspect.getsource(seed_script))
    imported = {
        node.module: [alias.name for alias in node.names]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("preempt")
    }
    assert imported == {"preempt_engine": ["LLM", "SamplingParams"]}
