"""The text encoder φ: its interface, the bag-of-words encoder, and `build_encoder`."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn

from elias.config import EncoderConfig, ResolvedEncoder
from elias.errors import ConfigError, DataError
from elias.kernels import bag_sum
from elias.kernels.cpu.matmul import use_bfloat16
from elias.text.batches import TokenBatch
from elias.text.tokens import Tokens
from elias.text.vectorizer import Featurizer

MIN_TEXTS_TO_OMIT_RARE = 80
"""With at least this many texts, the bag encoder omits words and n-grams that only one text
contains."""


class TextEncoder(nn.Module):
    """Base class of encoders, which map tokenized texts to embeddings φ(x) of width ``dim``."""

    dim: int
    dropout: nn.Dropout
    """Dropout on φ(x) during training."""
    reads_features: bool = False
    """True if the input is the sparse features of a corpus instead of text."""
    n_features: int = 0
    """Number of token ids or, if `reads_features` is True, of input features."""
    uses_numba: bool = False
    """True if most of the work on a CPU is done by numba kernels instead of torch."""
    capturable: bool = False
    """True if CUDA graphs can capture `forward`, for batches of `fixed_size_batch`."""
    pad_id: int = 0
    """Token id of padding and filler tokens."""
    max_length: int = 0
    """Maximum number of tokens that are encoded together."""
    current_windows: tuple[Tensor, Tensor] | None = None
    """While windows of long texts are encoded: the index of each row's text, and the index of the
    window within this text, for `KeyedDropout`. None if every row is a whole text."""
    current_tokens: tuple[Tensor, Tensor] | None = None
    """While texts are encoded without padding: the index of each token's text, and the position of
    the token within this text, for `KeyedDropout`."""

    @abstractmethod
    def tokenize(self, texts: Sequence[str]) -> Tokens:
        """Return the tokens of texts in the form that `forward` expects."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Return a string that is different for encoders that tokenize differently."""

    @abstractmethod
    def table_names(self) -> set[str]:
        """Return the names of the parameters that are tables with sparse gradients."""

    def prepare(self, device: torch.device) -> bool:  # noqa: ARG002 - for subclasses
        """Prepare for many batches, for example by compiling. Return whether anything changed."""
        return False

    def packs(self, device: torch.device) -> bool:  # noqa: ARG002 - for subclasses
        """Return whether `forward` reads batches on this device without padding."""
        return False

    @abstractmethod
    def forward(self, batch: TokenBatch) -> Float[Tensor, "B D"]:
        """Return φ(x) of each text, with dropout in training mode."""


class BagEncoder(TextEncoder):
    """Bag-of-words encoder: a tf-idf weighted sum of word vectors, and a residual block.

    φ(x) = LayerNorm(h + W₂·GELU(W₁·h)), where h is the weighted sum. The vectors of words and
    n-grams are trained from scratch. A text without known words has the same embedding as an empty
    text. Without a featurizer, the sparse features of a corpus take the place of words.
    """

    uses_numba = True

    def __init__(
        self, config: EncoderConfig, featurizer: Featurizer | None, n_features: int
    ) -> None:
        super().__init__()
        self.dim = config.dim
        self.featurizer = featurizer
        self.reads_features = featurizer is None
        self.n_features = n_features
        self.token_dropout = config.token_dropout
        vectors = torch.empty(n_features, config.dim)
        if not vectors.is_meta:  # random numbers on meta tensors import torch._dynamo (80 MB, 2 s)
            vectors.normal_().mul_(0.1)
        self.vectors = nn.Parameter(vectors)
        self.widen = nn.Linear(config.dim, config.hidden_dim)
        self.narrow = nn.Linear(config.hidden_dim, config.dim)
        self.norm = nn.LayerNorm(config.dim)
        self.dropout = nn.Dropout(config.dropout)

    def tokenize(self, texts: Sequence[str]) -> Tokens:
        """Return the known words and n-grams of the texts with their tf-idf weights."""
        assert self.featurizer is not None, "this encoder reads features, not texts"
        return Tokens(*self.featurizer.weigh(texts))

    @property
    def fingerprint(self) -> str:
        """Return a hash of the vocabulary and its idf weights."""
        assert self.featurizer is not None, "this encoder reads features, not texts"
        digest = hashlib.sha256(repr(self.featurizer.char_ngrams).encode())
        for terms in (self.featurizer.words, self.featurizer.ngrams):
            digest.update("\n".join(terms).encode("utf8", "surrogatepass") + b"\0")
        digest.update(self.featurizer.idf.tobytes())
        return f"bag {digest.hexdigest()}"

    def table_names(self) -> set[str]:
        """Return the name of the table of word and n-gram vectors."""
        return {"vectors"}

    def arrays(self) -> tuple[NDArray[np.float32], ...]:
        """Return the weights as `elias.kernels.cpu.embed_bags` reads them, without copies."""
        widen, narrow, norm = self.widen, self.narrow, self.norm
        layers = (widen.weight, widen.bias, narrow.weight, narrow.bias, norm.weight, norm.bias)
        return tuple(tensor.detach().numpy() for tensor in (self.vectors, *layers))

    def forward(self, batch: TokenBatch) -> Float[Tensor, "B D"]:
        """Return φ(x) of each text."""
        assert batch.weights is not None
        weights = batch.weights
        if self.training:
            weights = nn.functional.dropout(weights, self.token_dropout)
        summed = bag_sum(self.vectors, batch.ids, batch.offsets, weights)  # (B, D)
        n_products = summed.numel() * self.widen.out_features
        with torch.autocast("cpu", enabled=self.training and use_bfloat16(n_products)):
            residual = self.narrow(nn.functional.gelu(self.widen(summed)))
        mixed = summed + residual
        embedding: Tensor = self.norm(mixed)
        return self.dropout(embedding) if self.training else embedding


def build_encoder(
    config: ResolvedEncoder, texts: Sequence[str] | None, n_features: int | None
) -> TextEncoder:
    """Return a new encoder for a corpus of texts, or of ``n_features`` sparse features.

    Raises:
        ConfigError: If this kind of encoder cannot read the corpus.
        DataError: If the corpus has neither texts nor features, or no word that is frequent enough.
        ModelError: If the pretrained weights cannot be loaded.
    """
    if config.kind == "transformer":
        if texts is None:
            raise ConfigError(
                "encoder.model: the corpus has features, but no texts; set it to 'bag'"
            )
        # imported here: transformers is slow to import, and a bag of words does not need it
        from elias.model.transformer import TransformerEncoder

        return TransformerEncoder.from_config(config)
    if texts is None:
        if not n_features:
            raise DataError("the corpus has neither texts nor features; add one of them")
        return BagEncoder(config, None, n_features)
    featurizer = Featurizer.fit(
        texts,
        char_ngrams=config.char_ngrams,
        min_count=1 if len(texts) < MIN_TEXTS_TO_OMIT_RARE else 2,
        max_features=config.max_features,
    )
    if not featurizer.n_features:
        raise DataError(
            f"the {len(texts)} training texts contain no word, or none that two texts share; "
            "check the texts"
        )
    return BagEncoder(config, featurizer, featurizer.n_features)
