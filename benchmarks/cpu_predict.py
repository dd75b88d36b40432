"""Measure prediction on a CPU, one text at a time and in batches, with random weights.

python benchmarks/cpu_predict.py --labels 100000 --out RESULTS
python benchmarks/cpu_predict.py --labels 100000 --save MODEL  # only write the model

The baseline is the same encoder with a product over all L rows of W_L. Reports CPU time of all
threads as well, because other programs on the machine disturb it less than wall-clock time.
"""

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from cpu_setup import write_json

from elias import Elias, EliasConfig
from elias.model.batch_inference import embed_all
from elias.model.elias import EliasModel
from elias.model.encoder import build_encoder
from elias.model.graph import LabelGraph

WORDS = 20_000
EDGES_PER_LABEL = 10


def texts_of(count, rng, length):
    """Return texts of invented words with a skewed word frequency."""
    words = np.array([f"w{i:x}ord" for i in range(WORDS)])
    drawn = (WORDS * rng.random((count, length)) ** 3).astype(int)
    return [" ".join(words[row]) for row in drawn]


def make_model(given, texts, rng):
    config = EliasConfig()
    if given.encoder != "bag":
        config = config.override(
            {
                "encoder.model": given.encoder,
                "encoder.pooling": "mean",
            }
        )
    n_clusters = 2 ** round(np.log2(given.labels / 25))
    per_cluster = EDGES_PER_LABEL * given.labels // n_clusters
    config = config.override(
        {
            "index.n_clusters": n_clusters,
            "index.edges_per_cluster": per_cluster,
            "index.beam_size": 40,
            "index.shortlist_size": 2500,
            "rerank.enabled": False,
        }
    ).resolve(len(texts), given.labels)
    encoder = build_encoder(config.encoder, texts, None)
    edges = torch.from_numpy(
        np.stack([rng.choice(given.labels, per_cluster, replace=False) for _ in range(n_clusters)])
    )
    graph = LabelGraph(edges, given.labels, config.index.beta, edge_logits=torch.randn(edges.shape))
    model = EliasModel(encoder, graph, config.index.alpha)
    return Elias(model.eval(), config, [f"label {i}" for i in range(given.labels)])


def milliseconds(work, items):
    """Return wall-clock and CPU times of the work on each item."""
    for item in items[:5]:
        work(item)
    wall, cpu = [], []
    for item in items:
        start, start_cpu = time.perf_counter(), time.process_time()
        work(item)
        wall.append(1000 * (time.perf_counter() - start))
        cpu.append(1000 * (time.process_time() - start_cpu))
    return wall, cpu


def measure(given, sizes=(1, 32, 512)):
    """Yield a row of results for each batch size."""
    rng = np.random.default_rng(0)
    texts = texts_of(2_000, rng, given.words)
    model = make_model(given, texts, rng)
    weight = model.model.labels.weight

    def every_label(batch):
        tokens = model.model.encoder.tokenize(batch)
        with torch.no_grad():
            embedding = torch.from_numpy(embed_all(model.model.encoder, tokens))
            return (embedding @ weight.T).topk(5)

    for size in sizes:
        repeat = max(5, given.repeat // size)
        batches = [[texts[(i * size + j) % len(texts)] for j in range(size)] for i in range(repeat)]
        wall, cpu = milliseconds(lambda batch: model.predict(batch, top_k=5), batches)
        plain, plain_cpu = milliseconds(every_label, batches[: max(5, repeat // 4)])
        yield {
            "batch": size,
            "p50_ms": statistics.median(wall) / size,
            "p95_ms": float(np.percentile(wall, 95)) / size,
            "cpu_ms": statistics.median(cpu) / size,
            "every_label_ms": statistics.median(plain) / size,
            "every_label_cpu_ms": statistics.median(plain_cpu) / size,
        }


def arguments(parser):
    parser.add_argument("--labels", type=int, default=100_000)
    parser.add_argument("--encoder", default="bag", help="bag, or the folder of a transformer")
    parser.add_argument("--words", type=int, default=15, help="per text")
    parser.add_argument("--repeat", type=int, default=200)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    arguments(parser)
    parser.add_argument("--out", type=Path, help="folder for cpu_predict.json")
    parser.add_argument("--save", type=Path, help="folder to write the model to, unmeasured")
    given = parser.parse_args()
    if given.save is not None:
        rng = np.random.default_rng(0)
        make_model(given, texts_of(2_000, rng, given.words), rng).save_pretrained(given.save)
        return
    rows = []
    for row in measure(given):
        rows.append(row)
        print(
            "batch {batch:4d}  ms/text p50 {p50_ms:7.3f}  p95 {p95_ms:7.3f}  CPU {cpu_ms:7.3f}  "
            "every label {every_label_ms:7.3f}  CPU {every_label_cpu_ms:7.3f}".format(**row),
            flush=True,
        )
    results = {"labels": given.labels, "encoder": given.encoder, "rows": rows}
    write_json(given.out, "cpu_predict.json", results)


if __name__ == "__main__":
    main()
