"""Measure an ONNX export: time, size, memory, speed, and agreement of the labels.

python benchmarks/onnx_export.py MODEL [--texts FILE] [--int8] [--out RESULTS.json]

MODEL is a saved model or a run; `benchmarks/cpu_predict.py --save` writes one with random weights.
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
from cpu_predict import texts_of

from elias import Elias
from elias.persistence.onnx_runtime import OnnxModel


def timed(work):
    start = time.perf_counter()
    results = work()
    return results, time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument(
        "--texts", type=Path, help="file with one text per line; default: invented words"
    )
    parser.add_argument("--count", type=int, default=256)
    parser.add_argument("--top-k", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--int8", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.texts:
        texts = given.texts.read_text(encoding="utf8").splitlines()[: given.count]
    else:
        texts = texts_of(given.count, np.random.default_rng(0), 15)
    model = Elias.from_pretrained(given.model, device="cpu")
    stage = model.components[0]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        _, export = timed(lambda: model.export_onnx(path, top_k=given.top_k, int8=given.int8))
        size = path.stat().st_size
        exported, load = timed(lambda: OnnxModel(path))
        exported.predict(texts[: given.batch], top_k=5)
        theirs, ort = timed(
            lambda: exported.predict(texts, top_k=given.top_k, batch_size=given.batch)
        )
    model.predict(texts[: given.batch], component=stage)
    ours, torch_ = timed(
        lambda: model.predict(texts, top_k=given.top_k, batch_size=given.batch, component=stage)
    )
    both = (ours.ids < ours.n_labels) & (theirs.ids < theirs.n_labels)
    apart = np.abs(np.where(both, ours.scores, 0) - np.where(both, theirs.scores, 0))
    results = {
        "labels": model.n_labels,
        "int8": given.int8,
        "texts": len(texts),
        "batch": given.batch,
        "export_seconds": round(export, 1),
        "load_seconds": round(load, 1),
        "file_mb": round(size / 1e6, 1),
        "onnx_texts_per_second": round(len(texts) / ort, 1),
        "torch_texts_per_second": round(len(texts) / torch_, 1),
        "same_best_label": round(float((ours.ids[:, 0] == theirs.ids[:, 0]).mean()), 4),
        "same_ranks": round(float((ours.ids == theirs.ids).mean()), 5),
        "largest_difference": float(apart.max()),
        "peak_memory_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }
    print(json.dumps(results))
    if given.out:
        given.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
