"""The byte-level tokenizer of the tiny checkpoints: every id decodes, every text encodes.

256 bytes, and merges of two frequent letters up to the vocabulary's size; characters outside
ASCII take several tokens, as text streaming has to cope with.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

from preempt_harness.checkpoints.recipes import MAX_POSITIONS, SPECIAL_TOKENS, VOCAB_SIZE

_MERGED_LETTERS = "etaoinsrhldcumfp"
_BOS, _EOS, _PAD, _UNK = SPECIAL_TOKENS


def save_byte_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, which `AutoTokenizer` loads."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    num_merges = VOCAB_SIZE - len(SPECIAL_TOKENS) - len(alphabet)
    merges = list(product(_MERGED_LETTERS, _MERGED_LETTERS))[:num_merges]
    tokens = [*SPECIAL_TOKENS, *alphabet, *(first + second for first, second in merges)]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=_BOS,
        eos_token=_EOS,
        pad_token=_PAD,
        unk_token=_UNK,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
