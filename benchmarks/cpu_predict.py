"""How long a text takes on a CPU: one at a time, and many, with a model of random weights.

python benchmarks/cpu_predict.py --labels 100000 --out RESULTS

Beside the search stands what it saves: the same encoder and a product with all L rows of W_L.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from elias import Elias, EliasConfig
from elias.model.building import build_encoder
from elias.model.elias import EliasModel
from elias.model.graph import LabelGraph

WORDS = 20_000
EDGES_PER_LABEL = 10


def texts_of(count, rng, length):
    """Texts of made-up words, frequent ones more often."""
    words = np.array([f"w{i:x}ord" for i in range(WORDS)])
    drawn = (WORDS * rng.random((count, length)) ** 3).astype(int)
    return [" ".join(words[row]) for row in drawn]


def make_model(given, texts, rng):
    config = EliasConfig()
    if given.encoder != "bag":
        config = config.override(
            {
                "encoder.kind": "transformer",
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
    for item in items[:5]:
        work(item)
    spent = []
    for item in items:
        start = time.perf_counter()
        work(item)
        spent.append(1000 * (time.perf_counter() - start))
    return spent


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--labels", type=int, default=100_000)
    parser.add_argument("--encoder", default="bag", help="bag, or a folder of a transformer")
    parser.add_argument("--words", type=int, default=15, help="per text")
    parser.add_argument("--repeat", type=int, default=200)
    parser.add_argument("--out", type=Path, help="folder for cpu_predict.json")
    parser.add_argument("--save", type=Path, help="only write the model there, for serve_load.py")
    given = parser.parse_args()
    rng = np.random.default_rng(0)
    texts = texts_of(2_000, rng, given.words)
    model = make_model(given, texts, rng)
    if given.save:
        print(model.save_pretrained(given.save))
        return
    weight = model.model.labels.weight

    def every_label(batch):
        tokens = model.model.encoder.tokenise(batch)
        from elias.model.inference import embed_all

        with torch.no_grad():
            embedding = torch.from_numpy(embed_all(model.model.encoder, tokens))
            return (embedding @ weight.T).topk(5)

    rows = []
    for size in (1, 32, 512):
        repeat = max(5, given.repeat // size)
        batches = [[texts[(i * size + j) % len(texts)] for j in range(size)] for i in range(repeat)]
        ours = milliseconds(lambda batch: model.predict(batch, top_k=5), batches)
        plain = milliseconds(every_label, batches[: max(5, repeat // 4)])
        p50, p95 = statistics.median(ours) / size, float(np.percentile(ours, 95)) / size
        dense = statistics.median(plain) / size
        rows.append({"batch": size, "p50_ms": p50, "p95_ms": p95, "every_label_ms": dense})
        ratio = dense / p50
        print(
            f"batch {size:4d}  ms/text p50 {p50:7.3f}  p95 {p95:7.3f}  "
            f"every label {dense:7.3f} ({ratio:.1f}x)",
            flush=True,
        )
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        found = {"labels": given.labels, "encoder": given.encoder, "rows": rows}
        (given.out / "cpu_predict.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
