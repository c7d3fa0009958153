"""Incremental text against `decode` of everything, and stop strings against a plain search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from preempt_engine.detokenizer import IncrementalDetokenizer, TextDecoder
from preempt_engine.tokenizer import ExactTokenizer, HFTokenizer, Tokenizer

CORPUS = ["the cat sat on the mat.", "naïve “漢字” 😀🎉 e\u0301", "\ufffd and \x00", "the 漢"] * 4


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    """Byte-level BPE as in GPT-2; some tokens end within a character."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet)
    )
    backend.add_special_tokens(["<end>"])
    return saved(backend, tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    """SentencePiece style as in Llama 2: a space is part of the word, unknown text is bytes."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += ["<end>", "▁", *"acehmnost.", "▁t", "▁th", "▁the", "at", "▁c"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("a", "t"), ("▁", "c")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<end>"])
    return saved(backend, tmp_path_factory.mktemp("byte_fallback"))


def saved(backend: Backend, directory: Path) -> HFTokenizer:
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    return HFTokenizer(directory)


class WindowRecorder:
    """A tokenizer that remembers how many ids it was ever asked to decode at once."""

    def __init__(self, inner: Tokenizer) -> None:
        self.inner = inner
        self.longest = 0

    @property
    def vocab_size(self) -> int:
        return self.inner.vocab_size

    @property
    def eos_token_id(self) -> int | None:
        return self.inner.eos_token_id

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        self.longest = max(self.longest, len(token_ids))
        return self.inner.decode(token_ids)

    def is_skipped(self, token_id: int) -> bool:
        return self.inner.is_skipped(token_id)


# Text ---------------------------------------------------------------------------------------------

texts = st.text(st.sampled_from("the cat.\u00ef漢字😀🎉\u0301\ufffd\x00"), max_size=40)


@dataclass
class BytePieces:
    """The tokens of one byte each in a byte-level tokenizer."""

    id_of: dict[int, int]

    def __call__(self, data: bytes) -> list[int]:
        return [self.id_of[byte] for byte in data]


@pytest.fixture(scope="module")
def byte_ids(byte_level: HFTokenizer) -> BytePieces:
    """Reads GPT-2's table: visible Latin-1 bytes are themselves, the others follow from 256 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    character = {byte: chr(byte) for byte in visible}
    character |= {byte: chr(256 + i) for i, byte in enumerate(others)}
    to_id = byte_level._tokenizer.convert_tokens_to_ids
    return BytePieces({byte: to_id(text) for byte, text in character.items()})


@settings(max_examples=300)
@given(data=st.data())
def test_deltas_of_any_ids_concatenate_to_the_decoded_text(
    byte_level: HFTokenizer, byte_ids: BytePieces, data: st.DataObject
) -> None:
    """Includes invalid UTF-8, characters cut anywhere, special and unknown ids."""
    words = [byte_level.encode(text) for text in ("the cat", "漢字", "😀", "\ufffd", "e\u0301\x00")]
    cut = [byte_ids(part) for part in (b"\xf0", b"\x9f\x98", b"\x80", b"\xe6\xbc", b"\xa2", b"a")]
    any_id = st.integers(0, byte_level.vocab_size + 3).map(lambda i: [i])
    parts = data.draw(st.lists(any_id | st.sampled_from(words) | st.sampled_from(cut), max_size=60))
    token_ids = list(chain.from_iterable(parts))
    decoder = TextDecoder(byte_level)
    deltas = [decoder.push(token_id) for token_id in token_ids]
    assert "".join([*deltas, decoder.flush()]) == byte_level.decode(token_ids)


@given(text=texts)
def test_at_most_the_last_three_tokens_are_held_back(byte_level: HFTokenizer, text: str) -> None:
    text = text.replace("\ufffd", "")
    token_ids = byte_level.encode(text)
    decoder, returned = TextDecoder(byte_level), ""
    for i, token_id in enumerate(token_ids):
        returned += decoder.push(token_id)
        complete = byte_level.decode(token_ids[: max(0, i - 2)]).rstrip("\ufffd")
        assert returned.startswith(complete)
    assert returned == text


@given(text=st.text(st.sampled_from("the cat.\u00ef漢😀")))
def test_deltas_concatenate_with_byte_fallback_and_leading_spaces(
    byte_fallback: HFTokenizer, text: str
) -> None:
    token_ids = byte_fallback.encode(text)
    decoder = TextDecoder(byte_fallback)
    deltas = [decoder.push(token_id) for token_id in token_ids]
    assert "".join([*deltas, decoder.flush()]) == byte_fallback.decode(token_ids) == text


@pytest.mark.parametrize(
    "data",
    [
        b"a" * 2000,
        b"\x80" * 2000,
        b"\xf0" * 2000,
        b"\xf0\x9f\x98" * 2000,
        b"a\xe6\xbc\xa2" * 2000,
        b"a" + b"\x80" * 22 + b"a" + b"\x80" * 2000,  # the longest context, then no character
    ],
    ids=lambda data: repr(data[-8:]),
)
def test_the_decoded_window_does_not_grow_with_the_output(
    byte_level: HFTokenizer, byte_ids: BytePieces, data: bytes
) -> None:
    token_ids = byte_ids(data)
    recorder = WindowRecorder(byte_level)
    decoder = TextDecoder(recorder)
    deltas = [decoder.push(token_id) for token_id in token_ids]
    assert "".join([*deltas, decoder.flush()]) == byte_level.decode(token_ids)
    # 24 tokens without a complete character may become context, and 4 more prove the next such
    # run; see _MAX_WINDOW.
    assert recorder.longest <= 24 + 4


def test_special_tokens_have_no_text_and_no_cost(byte_level: HFTokenizer) -> None:
    end = byte_level.vocab_size - 1
    assert byte_level.is_skipped(end)
    recorder = WindowRecorder(byte_level)
    decoder = TextDecoder(recorder)
    assert [decoder.push(end) for _ in range(1000)] == [""] * 1000
    assert recorder.longest == 0


def test_a_character_of_several_tokens_comes_whole(
    byte_level: HFTokenizer, byte_ids: BytePieces
) -> None:
    decoder = TextDecoder(byte_level)
    token_ids = byte_ids("a🦀b".encode())
    assert [decoder.push(token_id) for token_id in token_ids] == ["a", "", "", "", "🦀", "b"]


def test_bytes_that_stay_incomplete_come_at_the_end(
    byte_level: HFTokenizer, byte_ids: BytePieces
) -> None:
    detokenizer = IncrementalDetokenizer(byte_level)
    for token_id in byte_ids(b"a\xf0\x9f"):
        detokenizer.push(token_id)
    assert (detokenizer.text, detokenizer.finish(), detokenizer.text) == ("a", "\ufffd", "a\ufffd")


# Stop strings -------------------------------------------------------------------------------------


def naive_stop(
    pieces: Sequence[str], stop: Sequence[str], min_tokens: int
) -> tuple[str, str | None, int]:
    """Search the whole text, end by end; return text, stop string, tokens taken."""
    text = "".join(pieces)
    owner = [i for i, piece in enumerate(pieces) for _ in piece]
    for end in range(1, len(text) + 1):
        found = [item for item in stop if text[:end].endswith(item)]
        if found and owner[end - 1] + 1 > min_tokens:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest, owner[end - 1] + 1
    return text, None, len(pieces)


def run(
    tokenizer: Tokenizer, token_ids: Sequence[int], stop: Sequence[str], min_tokens: int
) -> tuple[str, str | None, int]:
    """Push until a stop string; check that the deltas are the text."""
    detokenizer = IncrementalDetokenizer(tokenizer, stop=stop, min_tokens=min_tokens)
    deltas = []
    for token_id in token_ids:
        deltas.append(detokenizer.push(token_id))
        if detokenizer.stop_reason is not None:
            break
    deltas.append(detokenizer.finish())
    assert "".join(deltas) == detokenizer.text
    return detokenizer.text, detokenizer.stop_reason, detokenizer.num_tokens


stops = st.lists(st.text(st.sampled_from('!"#'), min_size=1, max_size=5), max_size=4)


@settings(max_examples=500)
@given(st.lists(st.integers(0, 2), max_size=30), stops, st.integers(0, 30))
def test_stop_strings_equal_a_search_of_the_whole_text(
    token_ids: list[int], stop: list[str], min_tokens: int
) -> None:
    tokenizer = ExactTokenizer(32)
    pieces = list(tokenizer.decode(token_ids))
    assert run(tokenizer, token_ids, stop, min_tokens) == naive_stop(pieces, stop, min_tokens)


@settings(max_examples=200)
@given(data=st.data(), text=st.text(st.sampled_from("the cat漢😀"), max_size=40))
def test_stop_strings_are_found_across_and_within_tokens(
    byte_level: HFTokenizer, data: st.DataObject, text: str
) -> None:
    token_ids = byte_level.encode(text)
    bounds = st.integers(0, len(text))
    cuts = data.draw(st.lists(st.tuples(bounds, bounds), max_size=3))
    stop = [text[a:b] for a, b in cuts if a < b]
    min_tokens = data.draw(st.integers(0, len(token_ids)))
    decoder = TextDecoder(byte_level)
    pieces = [decoder.push(token_id) for token_id in token_ids]
    assert run(byte_level, token_ids, stop, min_tokens) == naive_stop(pieces, stop, min_tokens)


@given(st.lists(st.integers(0, 2), max_size=30), stops)
def test_only_text_that_may_begin_a_stop_string_is_held_back(
    token_ids: list[int], stop: list[str]
) -> None:
    tokenizer = ExactTokenizer(32)
    detokenizer = IncrementalDetokenizer(tokenizer, stop=stop)
    for i, token_id in enumerate(token_ids, start=1):
        detokenizer.push(token_id)
        if detokenizer.stop_reason is not None:
            return
        text = tokenizer.decode(token_ids[:i])
        held = [
            n for n in range(len(text) + 1) for s in stop if n < len(s) and text.endswith(s[:n])
        ]
        assert detokenizer.text == text[: len(text) - max(held, default=0)]


@pytest.mark.parametrize(
    ("stop", "text", "expected"),
    [
        (["##"], "!!#!##", "!!#!"),
        (["!#", "#"], "!!#", "!"),  # both end together: the longer one
        (['!"#', '"'], '!"#', "!"),  # the one that ends first, not the one that begins first
        (['!!"'], '!!!"', "!"),  # the match begins within a failed one
    ],
)
def test_the_text_is_cut_before_the_first_stop_string(
    stop: list[str], text: str, expected: str
) -> None:
    tokenizer = ExactTokenizer(32)
    assert run(tokenizer, tokenizer.encode(text), stop, 0)[0] == expected


def test_a_stop_string_may_begin_before_min_tokens_but_not_end() -> None:
    tokenizer = ExactTokenizer(32)
    token_ids = tokenizer.encode("!##!")
    taken = [run(tokenizer, token_ids, ["##"], min_tokens)[2] for min_tokens in range(4)]
    assert taken == [3, 3, 3, 4]


def test_a_stop_string_of_incomplete_bytes_is_found_at_the_end(
    byte_level: HFTokenizer, byte_ids: BytePieces
) -> None:
    token_ids = byte_ids(b"ab\xf0")
    assert run(byte_level, token_ids, ["b\ufffd"], 0) == ("a", "b\ufffd", 3)


# Rebuilding ---------------------------------------------------------------------------------------


@given(data=st.data(), stop=st.lists(st.sampled_from(["cat", "th", "漢字", "x"]), max_size=2))
def test_the_state_is_a_function_of_the_token_ids(
    byte_level: HFTokenizer, data: st.DataObject, stop: list[str]
) -> None:
    ids = st.integers(0, byte_level.vocab_size - 1)
    token_ids = data.draw(st.lists(ids, max_size=60)) + byte_level.encode(data.draw(texts))
    used = IncrementalDetokenizer(byte_level, stop=stop)
    pushed: list[int] = []
    for token_id in token_ids:
        used.push(token_id)
        pushed.append(token_id)
        if used.stop_reason is not None:
            break
    rebuilt = IncrementalDetokenizer(byte_level, stop=stop)
    for token_id in pushed:
        rebuilt.push(token_id)
    assert rebuilt == used
    assert (rebuilt.finish(), rebuilt.text) == (used.finish(), used.text)
