"""The text encoder φ: what every kind offers, and the bag of words and character n-grams."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from elias.config import EncoderConfig
from elias.kernels import bag_sum
from elias.text.batches import PaddedBatch, TokenBatch
from elias.text.tokens import Tokens
from elias.text.vectorizer import Featurizer

if TYPE_CHECKING:
    from collections.abc import Sequence


class TextEncoder(nn.Module):
    """Turns tokenised texts into embeddings φ(x) of width ``dim``."""

    dim: int
    reads_features: bool = False
    """Whether its input is a corpus's own sparse features instead of text."""
    n_features: int = 0
    """How many features it reads, where it reads features."""

    @abstractmethod
    def tokenise(self, texts: Sequence[str]) -> Tokens:
        """Turn texts into tokens this encoder reads."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A string that changes whenever `tokenise` would answer differently."""

    @abstractmethod
    def table_names(self) -> set[str]:
        """Names of the parameters that are large tables, of which a step touches few rows."""

    compiled_loops: bool = False
    """Whether on a CPU most of its work is done by the loops of `elias.kernels`, not by torch."""

    def prepare(self, device: torch.device) -> bool:  # noqa: ARG002 - most need not
        """Get ready for long work on a device; say whether it runs otherwise from here on."""
        return False

    takes_rectangles: bool = False
    """Whether it reads padded texts as well (`embed`), so that its work can be recorded."""
    pad_id: int = 0
    """What pads them."""
    longest: int = 0
    """The most tokens they can have."""

    def embed(self, batch: PaddedBatch) -> Float[Tensor, "B D"]:
        """Return φ(x) for each of the padded texts, as `forward` does."""
        raise NotImplementedError

    @abstractmethod
    def forward(self, batch: TokenBatch) -> Float[Tensor, "B D"]:
        """Return φ(x) for each text, with dropout while training."""


class BagEncoder(TextEncoder):
    """φ(x) = LayerNorm(h + W₂·GELU(W₁·h)), h the tf-idf weighted sum of word and n-gram vectors.

    Learned from scratch; a text with no known word becomes the same neutral vector as an empty
    one. Without a featurizer the tokens are a corpus's own sparse features.
    """

    compiled_loops = True

    def __init__(
        self, config: EncoderConfig, featurizer: Featurizer | None, n_features: int
    ) -> None:
        super().__init__()
        self.dim = config.dim
        self.featurizer = featurizer
        self.reads_features = featurizer is None
        self.n_features = n_features
        self.token_dropout = config.token_dropout
        self.vectors = nn.Parameter(torch.randn(n_features, config.dim) * 0.1)
        self.widen = nn.Linear(config.dim, config.hidden_dim)
        self.narrow = nn.Linear(config.hidden_dim, config.dim)
        self.norm = nn.LayerNorm(config.dim)
        self.dropout = nn.Dropout(config.dropout)

    def tokenise(self, texts: Sequence[str]) -> Tokens:
        """Look the texts' words and n-grams up in the vocabulary."""
        assert self.featurizer is not None, "an encoder of given features reads no text"
        return Tokens.from_csr(self.featurizer.transform(texts))

    @property
    def fingerprint(self) -> str:
        """The vocabulary and its weights."""
        assert self.featurizer is not None, "an encoder of given features reads no text"
        digest = hashlib.sha256(repr(self.featurizer.char_ngrams).encode())
        for terms in (self.featurizer.words, self.featurizer.ngrams):
            digest.update("\n".join(terms).encode("utf8", "surrogatepass") + b"\0")
        digest.update(self.featurizer.idf.tobytes())
        return f"bag {digest.hexdigest()}"

    def table_names(self) -> set[str]:
        """Return the word and n-gram vectors."""
        return {"vectors"}

    def forward(self, batch: TokenBatch) -> Float[Tensor, "B D"]:
        """Return φ(x) for each text."""
        assert batch.weights is not None
        weights = nn.functional.dropout(batch.weights, self.token_dropout, self.training)
        summed = bag_sum(self.vectors, batch.ids, batch.offsets, weights)  # (B, D)
        mixed = summed + self.narrow(nn.functional.gelu(self.widen(summed)))
        embedding: Tensor = self.dropout(self.norm(mixed))
        return embedding
