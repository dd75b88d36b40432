"""A random BERT of a few hundred weights with a toy WordPiece tokenizer, made on the spot."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModel, BertConfig, PreTrainedTokenizerFast

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["red", "cod", "her", "##ring", "tape", "in", "the", "north", "sea", "quota"]
WIDTH = 16
MOST_TOKENS = 40


def make_tokenizer() -> Tokenizer:
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = BertPreTokenizer()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")],
    )
    # as published tokenizers come: cut and padded to a length of their own
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    return tokenizer


SIZES = {
    "vocab_size": len(SPECIAL) + len(WORDS),
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": MOST_TOKENS,
    "pad_token_id": 0,
    "initializer_range": 0.5,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def save_tiny_bert(folder) -> str:
    """Write the model as transformers does, pooling layer included, and return its folder."""
    return save_tiny_model(folder, BertConfig(**SIZES, **NO_DROPOUT))


def save_tiny_model(folder, config) -> str:
    """Write a random model of any kind with the toy tokenizer."""
    torch.manual_seed(1)
    AutoModel.from_config(config).save_pretrained(folder)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(),
        **{f"{name[1:-1].lower()}_token": name for name in SPECIAL},
    )
    fast.save_pretrained(folder)
    return str(folder)
