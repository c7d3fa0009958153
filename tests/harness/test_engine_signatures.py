"""What the adapters of whole engines ask for is what the installed packages offer.

Read from the packages' sources, since importing them needs a GPU or seconds. Where a package is
not installed, its tests are skipped; toy engines test the adapters' own books.
"""

from __future__ import annotations

import ast
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import pytest

from preempt_harness.adapters import nano_vllm, sglang, sglang_session, vllm, vllm_llm
from preempt_harness.adapters.nano_vllm_source import PACKAGE
from preempt_harness.adapters.protocol import EngineSettings
from preempt_harness.workload import SamplingSpec

DRAFTS = {"method": "ngram", "num_speculative_tokens": 2}


def settings(folder: Path, **more: object) -> EngineSettings:
    """On a checkpoint of which a configuration is all there is."""
    (folder / "config.json").write_text('{"vocab_size": 64, "max_position_embeddings": 512}')
    return EngineSettings(model=str(folder), num_blocks=8, block_size=16, max_model_len=64, **more)  # type: ignore[arg-type]  # names are given as they are


def source_of(package: str, distribution: str, tested: tuple[str, ...]) -> Path:
    """Folder of an installed package, of a version whose signatures are known; skips without."""
    try:
        installed = version(distribution)
    except PackageNotFoundError:
        pytest.skip(f"{distribution} is not installed; signatures tested: {', '.join(tested)}")
    if installed not in tested:
        pytest.skip(f"{distribution} {installed} is installed; tested: {', '.join(tested)}")
    spec = find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def class_of(path: Path, name: str) -> ast.ClassDef:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise AssertionError(f"{path} has no class {name}")


def fields_of(owner: ast.ClassDef) -> set[str]:
    """Annotated names of a class, as dataclasses and structs have them."""
    return {
        node.target.id
        for node in owner.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def arguments_of(owner: ast.ClassDef, method: str) -> set[str]:
    for node in owner.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == method:
            given = node.args
            return {item.arg for item in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
    raise AssertionError(f"{owner.name} has no method {method}")


# vLLM ---------------------------------------------------------------------------------------------


@pytest.fixture
def vllm_source() -> Path:
    return source_of("vllm", "vllm", vllm.TESTED_SIGNATURES)


def test_vllm_takes_the_engines_arguments(vllm_source: Path, tmp_path: Path) -> None:
    asked = vllm_llm.engine_arguments(settings(tmp_path, speculative_config=DRAFTS))
    offered = fields_of(class_of(vllm_source / "engine" / "arg_utils.py", "EngineArgs"))
    assert asked.keys() <= offered


def test_vllm_takes_the_sampling_arguments(vllm_source: Path) -> None:
    offered = fields_of(class_of(vllm_source / "sampling_params.py", "SamplingParams"))
    assert vllm_llm.sampling_arguments(SamplingSpec()).keys() <= offered


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("from_engine_args", {"engine_args"}),
        ("add_request", {"request_id", "prompt", "params", "priority"}),
        ("abort_request", {"request_ids"}),
        ("has_unfinished_requests", set()),
        ("step", set()),
        ("reset_prefix_cache", {"reset_running_requests"}),
        ("get_metrics", set()),
    ],
)
def test_vllms_engine_has_the_methods(vllm_source: Path, method: str, arguments: set[str]) -> None:
    engine = class_of(vllm_source / "v1" / "engine" / "llm_engine.py", "LLMEngine")
    assert arguments <= arguments_of(engine, method)


def test_vllms_outputs_have_what_is_read(vllm_source: Path) -> None:
    path = vllm_source / "outputs.py"
    assert {"index", "token_ids", "logprobs", "finish_reason", "stop_reason"} <= fields_of(
        class_of(path, "CompletionOutput")
    )
    assert {"request_id", "outputs", "finished", "num_cached_tokens", "prompt_logprobs"} <= (
        arguments_of(class_of(path, "RequestOutput"), "__init__")
    )


def test_vllm_counts_preemptions_under_the_name(vllm_source: Path) -> None:
    assert (
        f'"{vllm_llm.PREEMPTIONS}"' in (vllm_source / "v1" / "metrics" / "loggers.py").read_text()
    )


@pytest.mark.parametrize("name", [*vllm_llm.ENVIRONMENT, "VLLM_BATCH_INVARIANT"])
def test_vllm_reads_the_variables(vllm_source: Path, name: str) -> None:
    assert f'os.getenv("{name}"' in (vllm_source / "envs.py").read_text().replace("\n", "")


# nano-vllm ----------------------------------------------------------------------------------------


@pytest.fixture
def nano_source() -> Path:
    return source_of("nanovllm", PACKAGE, ("20260210",))


def test_nano_vllm_takes_the_arguments(nano_source: Path, tmp_path: Path) -> None:
    asked = nano_vllm.engine_arguments(settings(tmp_path))
    assert asked.keys() <= fields_of(class_of(nano_source / "config.py", "Config"))


def test_nano_vllms_parts_are_as_the_session_uses_them(nano_source: Path) -> None:
    engine = class_of(nano_source / "engine" / "llm_engine.py", "LLMEngine")
    assert arguments_of(engine, "exit") == {"self"}
    text = ast.unparse(engine)
    assert "self.model_runner.call('run', seqs, is_prefill)" in text
    assert "self.scheduler = Scheduler(config)" in text
    pool = class_of(nano_source / "engine" / "block_manager.py", "BlockManager")
    assert arguments_of(pool, "__init__") == {"self", "num_blocks", "block_size"}


def test_nano_vllm_refuses_greedy_sampling_and_takes_the_coldest(nano_source: Path) -> None:
    """So much that the likeliest token is all that is left."""
    text = (nano_source / "sampling_params.py").read_text()
    assert "assert self.temperature > 1e-10" in text


# SGLang -------------------------------------------------------------------------------------------


@pytest.fixture
def sglang_source() -> Path:
    return source_of("sglang", "sglang", sglang.TESTED_SIGNATURES) / "srt"


def test_sglang_takes_the_engines_arguments(sglang_source: Path, tmp_path: Path) -> None:
    offered: set[str] = set()
    for path in (sglang_source / "arg_groups" / "fields").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                offered |= fields_of(node)
    assert sglang_session.engine_arguments(settings(tmp_path)).keys() <= offered


def test_sglang_takes_the_sampling_arguments(sglang_source: Path) -> None:
    path = sglang_source / "sampling" / "sampling_params.py"
    asked = sglang_session.sampling_arguments(SamplingSpec())
    assert asked.keys() <= fields_of(class_of(path, "SamplingParams"))


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        (
            "async_generate",
            {"input_ids", "sampling_params", "return_logprob", "top_logprobs_num", "stream", "rid"},
        ),
        ("generate", {"input_ids", "sampling_params", "token_ids_logprob"}),
        ("shutdown", set()),
    ],
)
def test_sglangs_engine_has_the_methods(
    sglang_source: Path, method: str, arguments: set[str]
) -> None:
    engine = class_of(sglang_source / "entrypoints" / "engine.py", "Engine")
    assert arguments <= arguments_of(engine, method)
    assert "self.loop = " in ast.unparse(engine)


def test_sglang_answers_with_what_is_read(sglang_source: Path) -> None:
    text = (sglang_source / "managers" / "tokenizer_manager.py").read_text()
    names = ("finish_reason", "cached_tokens", sglang_session.RETRACTIONS, "output_ids")
    names += ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
    assert [name for name in names if f'"{name}"' not in text] == []
    assert "def abort_request(self, rid: str" in text


@pytest.mark.parametrize("name", sglang_session.SWITCHES.values())
def test_sglang_reads_the_switches(sglang_source: Path, name: str) -> None:
    assert f"{name} = Env" in (sglang_source / "environ.py").read_text()
