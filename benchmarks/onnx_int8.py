"""Measure the cost of 8 bits for a transformer with centroid classifiers, without training.

python benchmarks/onnx_int8.py DATA ENCODER [--train 4000] [--test 1000] [--out RESULTS.json]

The classifier of each label is the mean direction of φ over its training points, and every label is
scored. The same model then predicts with torch, with ONNX, and with ONNX in 8 bits.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from elias import Elias, EliasConfig, load_corpus
from elias.metrics import score
from elias.model.batch_inference import embed_all
from elias.model.encoder import build_encoder
from elias.model.one_vs_all import OneVsAll
from elias.persistence.onnx_runtime import OnnxModel

SHARPNESS = 20.0
METRICS = ("P@1", "P@3", "P@5", "R@10", "R@100")


def centroid_model(corpus, rows, encoder_folder):
    """Return a model with centroid classifiers, without training."""
    config = EliasConfig().override(
        {
            "encoder.model": encoder_folder,
            "encoder.pooling": "mean",
            "index.kind": "all",
            "rerank.enabled": False,
        }
    )
    config = config.resolve(len(rows), corpus.n_labels)
    train = corpus.train.take(rows)
    encoder = build_encoder(config.encoder, train.texts, None).eval()
    embedding = embed_all(encoder, encoder.tokenize(list(train.texts)))
    embedding = embedding / np.linalg.norm(embedding, axis=1, keepdims=True)
    centroids = train.labels.T @ embedding
    lengths = np.linalg.norm(centroids, axis=1, keepdims=True)
    model = OneVsAll(encoder, corpus.n_labels)
    with torch.no_grad():
        weight = SHARPNESS * centroids / np.maximum(lengths, 1e-9)
        model.labels.weight.copy_(torch.from_numpy(np.asarray(weight, dtype=np.float32)))
        unknown = torch.from_numpy(lengths[:, 0] == 0)
        model.labels.bias.copy_(torch.where(unknown, -1e3, -SHARPNESS))
    return Elias(model.eval(), config, corpus.label_names)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("encoder", help="folder of a transformer")
    parser.add_argument("--train", type=int, default=4000)
    parser.add_argument("--test", type=int, default=1000)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    corpus = load_corpus(given.data)
    model = centroid_model(corpus, np.arange(min(given.train, len(corpus.train))), given.encoder)
    test = corpus.test.take(np.arange(min(given.test, len(corpus.test))))
    texts = list(test.texts)
    results = []

    def measure(name, predict, size=None):
        start = time.perf_counter()
        ranked = predict(texts)
        row = {"name": name, "file_mb": size, "seconds": round(time.perf_counter() - start, 1)}
        row |= score(ranked, test.labels, None, METRICS)
        row["same_best_label"] = float((ranked.ids[:, 0] == first.ids[:, 0]).mean())
        print(json.dumps(row), flush=True)
        results.append(row)

    first = model.predict(texts, top_k=100, batch_size=32)
    measure("torch", lambda given: model.predict(given, top_k=100, batch_size=32))
    with tempfile.TemporaryDirectory() as folder:
        for int8 in (False, True):
            path = model.export_onnx(Path(folder) / f"{int8}.onnx", int8=int8)
            exported = OnnxModel(path)
            measure(
                "onnx int8" if int8 else "onnx",
                lambda given, own=exported: own.predict(given, top_k=100, batch_size=32),
                round(path.stat().st_size / 1e6, 1),
            )
    if given.out:
        given.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
