"""A model that was exported to ONNX, run by onnxruntime: text in, ranked labels out, no torch.

The file has everything: encoder and search as a graph, and as metadata the tokenizer and the names
of the labels. `elias.persistence.onnx_export` writes it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from elias.errors import DataError, ModelError
from elias.predictions import PADDING_SCORE, Predictions
from elias.text.vectorizer import Featurizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


METADATA = "elias"
"""The key of the metadata: JSON with the fields of `describe_bag` or `describe_tokens`."""
FORMAT = 1
"""Raised when an older `OnnxModel` could not read what is written."""
BAG, TRANSFORMER = "bag", "transformer"
BATCH_SIZE = 32


def need_onnx(module: str) -> ModelError:
    """Return the error for a package that is not installed."""
    return ModelError(f"{module} is not installed; pip install 'elias-xmc[export]' brings it")


def describe_bag(featurizer: Featurizer) -> dict[str, Any]:
    """Return what turns texts into the bag's input, as JSON."""
    return {
        "kind": BAG,
        "words": featurizer.words,
        "ngrams": featurizer.ngrams,
        "idf": featurizer.idf.tolist(),
        "char_ngrams": featurizer.char_ngrams,
        "word_ngrams": featurizer.word_ngrams,
    }


def describe_tokens(tokenizer: str, pad_id: int) -> dict[str, Any]:
    """Return what turns texts into a transformer's input, as JSON."""
    return {"kind": TRANSFORMER, "tokenizer": tokenizer, "pad_id": pad_id}


class OnnxModel:
    """A model read from an ONNX file, with its labels' names.

    It ranks as the last stage of the exported model does (``component="stage2"``): a ranker,
    calibration, probabilities and other members of an ensemble are not in the file.

    Example:
        ``OnnxModel("model.onnx").predict(["cod quotas"], top_k=5)[0].labels``
    """

    def __init__(self, path: str | Path, *, threads: int | None = None) -> None:
        """Read a file.

        Args:
            path: What `Elias.export_onnx` or ``elias export`` wrote.
            threads: How many to compute with; None: all cores.

        Raises:
            ModelError: If it is not such a file, or onnxruntime is not installed.
        """
        try:
            import onnxruntime
        except ImportError:
            raise need_onnx("onnxruntime") from None
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or 0
        options.log_severity_level = 3
        if not Path(path).is_file():
            raise ModelError(f"{path}: no such file; elias export writes one")
        try:
            self.session = onnxruntime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
            kept = self.session.get_modelmeta().custom_metadata_map.get(METADATA)
        except Exception as error:  # onnxruntime's errors share no other class
            first = str(error).partition("\n")[0]
            raise ModelError(f"{path}: cannot be read ({first}); export the model again") from error
        if kept is None:
            raise ModelError(f"{path}: was not written by elias export, so it has no labels")
        described = json.loads(kept)
        if described["format"] > FORMAT:
            raise ModelError(f"{path}: is of a newer version; upgrade elias-xmc")
        self.label_names: tuple[str, ...] = tuple(described["labels"])
        """One name for each label."""
        self.top_k: int = described["top_k"]
        """Most labels that it ranks for a text."""
        self._read = _reader(described["encoder"])

    def predict(
        self, texts: Sequence[str], *, top_k: int = 5, batch_size: int = BATCH_SIZE
    ) -> Predictions:
        """Return the ``top_k`` best labels of each text, best first.

        Raises:
            DataError: If more labels are asked for than the file ranks, or a text is no string.
        """
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise DataError("predict takes a list of texts; wrap a text in a list: [text]")
        if not 1 <= top_k <= self.top_k:
            raise DataError(
                f"top_k must be 1 to {self.top_k}, not {top_k}; export again with a larger top_k"
            )
        parts = [
            self.session.run(None, self._read(texts[start : start + batch_size]))
            for start in range(0, len(texts), batch_size)
        ]
        n_labels = len(self.label_names)
        empty = np.zeros((0, top_k))
        ids = np.concatenate([empty, *(part[0][:, :top_k] for part in parts)]).astype(np.int64)
        scores = np.concatenate([empty, *(part[1][:, :top_k] for part in parts)])
        scores = np.where(ids < n_labels, scores, PADDING_SCORE).astype(np.float32)
        return Predictions(ids, scores, n_labels, self.label_names)


def _reader(encoder: dict[str, Any]) -> Any:
    """Return what turns texts into the graph's inputs."""
    if encoder["kind"] == BAG:
        featurizer = Featurizer(
            tuple(encoder["words"]),
            tuple(encoder["ngrams"]),
            np.array(encoder["idf"], dtype=np.float32),
            (encoder["char_ngrams"][0], encoder["char_ngrams"][1]),
            encoder["word_ngrams"],
        )
        return lambda texts: _bag_input(featurizer, texts)

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(encoder["tokenizer"])
    return lambda texts: _token_input(tokenizer, encoder["pad_id"], texts)


def _bag_input(featurizer: Featurizer, texts: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Return the ids of words and n-grams and their weights, padded by a weight of 0."""
    features = featurizer.transform(texts)
    inside = _inside(np.diff(features.indptr))
    ids = np.zeros(inside.shape, dtype=np.int64)
    weights = np.zeros(inside.shape, dtype=np.float32)
    ids[inside], weights[inside] = features.indices, features.data
    return {"ids": ids, "weights": weights}


def _token_input(tokenizer: Any, pad_id: int, texts: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Return token ids, padded, and which of them are a text's."""
    clean = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
    rows = [encoding.ids or [pad_id] for encoding in tokenizer.encode_batch_fast(clean)]
    inside = _inside(np.array([len(row) for row in rows]))
    ids = np.full(inside.shape, pad_id, dtype=np.int64)
    ids[inside] = np.concatenate(rows)
    return {"ids": ids, "mask": inside.astype(np.int64)}


def _inside(lengths: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which places of the padded rectangle hold something."""
    inside: NDArray[np.bool_] = np.arange(max(1, int(lengths.max()))) < lengths[:, None]
    return inside
