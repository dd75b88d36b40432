"""Predict with a model that was exported to ONNX.

The file contains the encoder and the search as a graph, and the tokenizer and the label names as
metadata. `elias.persistence.onnx_export` writes it. This module needs numpy, onnxruntime and, for
transformers, tokenizers. The distribution elias-xmc-runtime has only this module and its imports.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from elias.errors import DataError, ModelError, check_strings
from elias.predictions import PADDING_SCORE, Predictions, Ranking
from elias.text.vectorizer import Featurizer, weigh_terms, words_of

METADATA = "elias"
"""Metadata key whose value is JSON with ``format``, ``labels``, ``top_k`` and ``encoder``."""
FORMAT = 1
"""Format version. It increases when an older `OnnxModel` cannot read the new format."""
BAG, TRANSFORMER = "bag", "transformer"
"""Kinds of encoders. The file stores the `Featurizer` of a bag, or a transformer's tokenizer."""
BATCH_SIZE = 32


def missing_package(name: str) -> ModelError:
    """Return the error for a package that is not installed."""
    return ModelError(f"{name} is not installed; pip install 'elias-xmc[export]'")


class OnnxModel:
    """A model loaded from an ONNX file.

    It predicts like the last stage of the exported model (``component="stage2"``), because the file
    does not contain the ranker, the calibration or the probabilities.

    Example:
        ``OnnxModel("model.onnx").predict(["cod quotas"], top_k=5)[0].labels``
    """

    def __init__(self, path: str | Path, *, threads: int | None = None) -> None:
        """Load an exported model.

        Args:
            path: A file written by `Elias.export_onnx` or ``elias export``.
            threads: Number of threads. None uses all cores.

        Raises:
            ModelError: If the file is not an exported model, or onnxruntime is not installed.
        """
        try:
            import onnxruntime
        except ImportError:
            raise missing_package("onnxruntime") from None
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or 0
        options.log_severity_level = 3
        if not Path(path).is_file():
            raise ModelError(f"{path}: no such file; create it with elias export")
        try:
            self.session = onnxruntime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
            metadata = self.session.get_modelmeta().custom_metadata_map.get(METADATA)
        except Exception as error:  # onnxruntime's errors have no other common base class
            first = str(error).partition("\n")[0]
            raise ModelError(f"{path}: cannot be read ({first}); export the model again") from error
        if metadata is None:
            raise ModelError(f"{path}: was not written by elias export; export the model again")
        tree = json.loads(metadata)
        if tree["format"] > FORMAT:
            raise ModelError(
                f"{path}: format {tree['format']} is newer than {FORMAT}; upgrade elias-xmc"
            )
        self.label_names: tuple[str, ...] = tuple(tree["labels"])
        """The name of each label."""
        self.top_k: int = tree["top_k"]
        """Maximum number of labels that the model can predict for a text."""
        self._encoder = tree["encoder"]
        if self._encoder["kind"] == BAG:
            self._featurizer = Featurizer(
                tuple(self._encoder["words"]),
                tuple(self._encoder["ngrams"]),
                np.array(self._encoder["idf"], dtype=np.float32),
                tuple(self._encoder["char_ngrams"]),
                self._encoder["word_ngrams"],
            )
        else:
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_str(self._encoder["tokenizer"])

    @overload
    def predict(  # type: ignore[overload-overlap]  # a str is a sequence of str
        self, texts: str, *, top_k: int = ..., batch_size: int = ...
    ) -> Ranking: ...

    @overload
    def predict(
        self, texts: Sequence[str], *, top_k: int = ..., batch_size: int = ...
    ) -> Predictions: ...

    def predict(
        self, texts: str | Sequence[str], *, top_k: int = 5, batch_size: int = BATCH_SIZE
    ) -> Predictions | Ranking:
        """Return the ``top_k`` best labels of each text, or of a single text, best first.

        Raises:
            DataError: If ``top_k`` is below 1 or above the ``top_k`` of the export, or a text is
                not a string.
        """
        if isinstance(texts, str):
            return self.predict([texts], top_k=top_k, batch_size=batch_size)[0]
        check_strings("texts", texts)
        if not 1 <= top_k <= self.top_k:
            raise DataError(
                f"top_k must be from 1 to {self.top_k}, not {top_k}; give another, or export the "
                "model again with a larger top_k"
            )
        batches = [
            self.session.run(None, self._inputs(texts[start : start + batch_size]))
            for start in range(0, len(texts), batch_size)
        ]
        n_labels = len(self.label_names)
        empty = np.zeros((0, top_k))
        ids = np.concatenate([empty, *(batch[0][:, :top_k] for batch in batches)]).astype(np.int64)
        scores = np.concatenate([empty, *(batch[1][:, :top_k] for batch in batches)])
        scores = np.where(ids < n_labels, scores, PADDING_SCORE).astype(np.float32)
        return Predictions(ids, scores, n_labels, self.label_names)

    def _inputs(self, texts: Sequence[str]) -> dict[str, NDArray[Any]]:
        """Return the padded token ids of texts, with their tf-idf weights or the attention mask."""
        values: NDArray[Any]
        if self._encoder["kind"] == BAG:
            featurizer = self._featurizer  # `Featurizer.transform` would need scipy
            words = (words_of(text, symbols=featurizer.reads_symbols) for text in texts)
            terms = featurizer.feature_ids(words)
            indptr, ids, values = weigh_terms(*terms, featurizer.idf, len(featurizer.words), False)
            name, lengths, pad_id = "weights", np.diff(indptr), 0
        else:
            clean = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
            pad_id = self._encoder["pad_id"]
            rows = [row.ids or [pad_id] for row in self._tokenizer.encode_batch_fast(clean)]
            lengths, ids = np.array([len(row) for row in rows]), np.concatenate(rows)
            name, values = "mask", np.ones(len(ids), dtype=np.int64)
        inside = np.arange(max(1, int(lengths.max()))) < lengths[:, None]  # False for padding
        inputs = {
            "ids": np.full(inside.shape, pad_id, dtype=np.int64),
            name: np.zeros(inside.shape, dtype=values.dtype),
        }
        inputs["ids"][inside], inputs[name][inside] = ids, values
        return inputs
