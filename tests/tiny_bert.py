"""A random BERT of a few hundred weights with a toy WordPiece tokenizer, made on the spot."""

from __future__ import annotations

import numpy as np
import torch
from scipy.sparse import csr_matrix
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModel, BertConfig, PreTrainedTokenizerFast

from elias.data.corpus import Corpus, Split

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


def corpus_of_long_texts(n_points=80) -> Corpus:
    """Return points whose labels are named after more words than a window of six tokens has."""
    rng = np.random.default_rng(0)
    names = np.array(["red", "cod", "tape", "sea", "quota"])
    truth = rng.random((n_points, len(names))) < 0.3
    truth[np.arange(n_points), rng.integers(0, len(names), n_points)] = True
    before = rng.integers(2, 5, n_points)
    texts = [
        " ".join(["in the"] * n + names[row].tolist()) for n, row in zip(before, truth, strict=True)
    ]
    split = Split(labels=csr_matrix(truth.astype(np.float32)), texts=texts)
    return Corpus(train=split, test=split, label_names=names.tolist())


def windows_config(model: str) -> dict[str, object]:
    """Return the settings of a transformer that reads these texts whole, trained one-vs-all."""
    return {
        "index.kind": "all",
        "encoder.model": model,
        "encoder.max_length": 6,
        "encoder.windows": 5,
        "encoder.dropout": 0.0,
        "eval.validation_size": 0,
        "rerank.enabled": False,
        "stages.one-vs-all.epochs": 12,
        "stages.one-vs-all.batch_size": 8,
        "stages.one-vs-all.encoder_lr": 1e-2,
        "stages.one-vs-all.label_lr": 5e-2,
    }
