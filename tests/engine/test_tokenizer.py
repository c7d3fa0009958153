"""Tokenizers: the exact model's bijection, Hugging Face directories, and errors that help."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from preempt_engine.errors import InfeasibleRequestError, ModelNotFoundError
from preempt_engine.tokenizer import ExactTokenizer, HFTokenizer


@given(st.integers(32, 256), st.data())
def test_exact_tokenizer_maps_ids_and_characters_one_to_one(
    vocab_size: int, data: st.DataObject
) -> None:
    tokenizer = ExactTokenizer(vocab_size)
    token_ids = data.draw(st.lists(st.integers(0, vocab_size - 1)))
    text = tokenizer.decode(token_ids)
    assert len(text) == len(token_ids)
    assert text.isprintable()
    assert " " not in text
    assert tokenizer.encode(text) == token_ids


def test_exact_tokenizer_has_as_many_characters_as_ids() -> None:
    tokenizer = ExactTokenizer(256)
    assert len(set(tokenizer.decode(range(256)))) == tokenizer.vocab_size == 256
    assert tokenizer.decode(range(3)) == '!"#'


def test_exact_tokenizer_names_the_character_it_does_not_have() -> None:
    with pytest.raises(InfeasibleRequestError, match=r"no character ' ' \(prompt index 2\)"):
        ExactTokenizer(64).encode("AB C")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer with one special and one ordinary added token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
    )
    tokenizer.train_from_iterator(["the cat sat on the mat"] * 4, trainer)
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.add_tokens([AddedToken("<note>", special=False)])
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}'
    )
    return path


def test_hf_tokenizer_round_trips_text(directory: Path) -> None:
    tokenizer = HFTokenizer(directory)
    text = "the cat , sat 'on' the … mat 😀"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_hf_tokenizer_skips_exactly_what_decode_leaves_out(directory: Path) -> None:
    tokenizer = HFTokenizer(directory)
    outside = [tokenizer.vocab_size, tokenizer.vocab_size + 1000]
    skipped = {i for i in [*range(tokenizer.vocab_size), *outside] if tokenizer.is_skipped(i)}
    left_out = {i for i in [*range(tokenizer.vocab_size), *outside] if tokenizer.decode([i]) == ""}
    assert skipped == left_out == {tokenizer.eos_token_id, *outside}


def test_a_directory_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="nowhere does not exist"):
        HFTokenizer(tmp_path / "nowhere")


def test_a_checkpoint_without_a_tokenizer_tells_how_to_do_without(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelNotFoundError, match="skip_tokenizer_init=True"):
        HFTokenizer(tmp_path)


def test_a_broken_tokenizer_file_is_an_error_with_its_cause(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("not json")
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    with pytest.raises(ModelNotFoundError, match="cannot be read") as error:
        HFTokenizer(tmp_path)
    assert error.value.__cause__ is not None


def test_code_that_a_checkpoint_brings_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", null]}}'
    )
    with pytest.raises(ModelNotFoundError, match="contains custom code"):
        HFTokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()
