"""Measure training that goes on from a model with new points and new labels.

    PYTHONPATH=src python3 benchmarks/continue_training.py data/mesh-titles --out RUNS/continued

A tenth of the labels is new: the old data, 80% of the training points, does not have them. A model
is trained on the old data. Then the rest of the points, which have all labels, arrives:

- ``added``: the new labels are added to the old model, with their new points as examples,
- ``new``: training goes on from the old model, with the new points alone,
- ``sample``: with the new points and as many old ones,
- ``both``: with all points,
- ``scratch``: a model is trained on all points from the start.

All are measured on the test points, which have all labels. A model that is in ``--out`` is not
trained again.
"""

import argparse
import logging
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from cpu_setup import write_json
from scipy.sparse import csr_matrix

from elias import Corpus, Elias, EliasConfig, load_corpus, train
from elias.metrics import score

ROWS = ("old", "added", "new", "sample", "both", "scratch")
NEW_LABELS, OLD_POINTS = 0.1, 0.8
METRICS = ["P@1", "P@5", "R@100"]


def parts(corpus: Corpus, seed: int) -> dict[str, Corpus]:
    """Return the corpora to train on."""
    random = np.random.default_rng(seed)
    is_new = np.zeros(corpus.n_labels, dtype=bool)
    is_new[random.permutation(corpus.n_labels)[: round(NEW_LABELS * corpus.n_labels)]] = True
    order = random.permutation(len(corpus.train))
    count = round(OLD_POINTS * len(order))
    n_new = len(order) - count
    is_old = np.zeros(len(order), dtype=bool)
    is_old[order[:count]] = True
    labels = corpus.train.labels.tocoo()
    is_known = ~(is_old[labels.row] & is_new[labels.col])
    entries = (labels.data[is_known], (labels.row[is_known], labels.col[is_known]))
    known = replace(corpus.train, labels=csr_matrix(entries, shape=labels.shape))

    def part(rows: np.ndarray) -> Corpus:
        """Return the corpus of some points, with the labels that these points have."""
        split = known.take(np.sort(rows[np.diff(known.labels.indptr)[rows] > 0]))
        used = np.flatnonzero(np.bincount(split.labels.indices, minlength=corpus.n_labels))
        split = replace(split, labels=split.labels[:, used])
        names = corpus.label_table.take(used.tolist())
        return replace(corpus.with_splits(train=split, test=None), label_names=names)

    return {
        "old": part(order[:count]),
        "new": part(order[count:]),
        "sample": part(order[count - n_new :]),
        "both": part(order),
        "scratch": part(order),
    }


def measure(model: Elias, corpus: Corpus, old: Corpus) -> dict[str, float]:
    """Return the metrics on the test points for all labels, those of the old data, and others."""
    aligned = corpus.align_labels(model.label_table)
    predictions = model.predict(list(corpus.test.texts), top_k=100).among(aligned.label_names)
    is_new = np.array([match is None for match in old.label_table.match(aligned.label_table)])
    results = {}
    for name, mask in (("all", np.ones_like(is_new)), ("old", ~is_new), ("new", is_new)):
        truth = aligned.test.labels @ csr_matrix((mask.astype(np.float32), (range(len(mask)),) * 2))
        truth.eliminate_zeros()
        rows = np.flatnonzero(np.diff(truth.indptr))
        values = score(predictions.take(rows), truth[rows], None, METRICS)
        results |= {f"{name} {metric}": value for metric, value in values.items()}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    corpus = load_corpus(args.corpus)
    corpora = parts(corpus, args.seed)
    config = EliasConfig().override({"seed": args.seed})
    for row in args.rows:
        start = time.perf_counter()
        if row == "added":
            old = Elias.from_pretrained(args.out / "old", device="cpu")
            table = corpora["new"].label_table
            unknown = [i for i, m in enumerate(old.label_table.match(table)) if m is None]
            model = old.add_labels(table.take(unknown), corpora["new"])
        elif (args.out / row / "model").exists():
            model = Elias.from_pretrained(args.out / row, device="cpu")
        else:
            first = None
            if row not in ("old", "scratch"):
                first = Elias.from_pretrained(args.out / "old", device="cpu")
            folder = args.out / row
            model = train(corpora[row], config, out=folder, init_from=first, device="cpu")
        seconds = time.perf_counter() - start
        if row != "added":
            seconds = sum(model.metadata["timings"].values())
        results = {"seconds": seconds} | measure(model, corpus, corpora["old"])
        shown = "  ".join(f"{key} {value:.2f}" for key, value in results.items())
        print(f"{row}: {shown}", flush=True)
        write_json(args.out, f"{row}.json", results)


if __name__ == "__main__":
    main()
