"""Measure labels that a model has never seen, and labels added with a few examples.

    PYTHONPATH=src python3 benchmarks/zero_shot.py data/mesh-titles --out RUNS/zero-shot --seed 0

A tenth of the labels that have test points is hidden: their columns are removed from the training
points, a model is trained on the rest (or loaded, if ``--out`` has one), and the hidden labels are
added by their texts, with 0, 1 and 5 examples. A second tenth is hidden for tuning: with
``--tune``, these labels and held-out training points are measured instead of the test points.

ZS: points with a hidden label, ranking only hidden labels. GZS: all points, all labels; R@10 of
seen and of hidden labels and their harmonic mean. Beside them: random; popularity, which knows the
hidden training counts; BM25 on names. ``seen P@1`` counts only seen labels as relevant, so that a
correct hidden label on the first rank is a loss; P@1 of points without hidden labels is not.
"""

import argparse
import logging
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
from cpu_setup import write_json
from scipy.sparse import csr_matrix

from elias import Corpus, Elias, EliasConfig, LabelTable, load_corpus, train
from elias.metrics import evaluate, score
from elias.predictions import Predictions
from elias.text.vectorizer import words_of

SHARE = 0.1
VALIDATION = 2000
SHOTS = (0, 1, 5)


def hide_labels(corpus: Corpus, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the labels to test with and those to tune with, both drawn from those tested."""
    tested = np.flatnonzero(np.bincount(corpus.test.labels.indices, minlength=corpus.n_labels))
    order = np.random.default_rng(seed).permutation(tested)
    count = round(SHARE * len(tested))
    return np.sort(order[:count]), np.sort(order[count : 2 * count])


def select(corpus: Corpus, labels: np.ndarray, *, drop_empty: bool = False) -> Corpus:
    """Return the corpus over some labels, optionally without points that have none of them."""
    splits = {}
    for name, split in corpus.splits.items():
        columns = split.labels[:, labels]
        splits[name] = replace(split, labels=columns, filters=None)
        if drop_empty and name != "test":
            splits[name] = splits[name].take(np.flatnonzero(np.diff(columns.indptr)))
    names = corpus.label_table.take(labels.tolist())
    return replace(corpus.with_splits(**splits), label_names=names, label_features=None)


def hold_out(corpus: Corpus, seed: int) -> Corpus:
    """Return the corpus with some of its training points as validation points."""
    order = np.random.default_rng(seed).permutation(len(corpus.train))
    rows = np.sort(order[:VALIDATION]), np.sort(order[VALIDATION:])
    validation, rest = map(corpus.train.take, rows)
    return corpus.with_splits(train=rest, validation=validation)


def few_examples(corpus: Corpus, labels: np.ndarray, count: int, seed: int) -> dict:
    """Return up to ``count`` training texts of each label."""
    columns, random = corpus.train.labels.tocsc(), np.random.default_rng(seed)
    examples = {}
    for label in labels.tolist():
        rows = random.permutation(columns[:, label].indices)[:count]
        examples[corpus.label_names[label]] = [corpus.train.texts[row] for row in rows]
    return examples


def bm25(names: LabelTable, texts: list[str], k1: float = 1.2, b: float = 0.75) -> csr_matrix:
    """Return the BM25 scores of label names (documents) for texts (queries)."""
    documents = [Counter(words_of(name)) for name in names]
    column: dict[str, int] = {}
    for words in documents:
        for word in words:
            column.setdefault(word, len(column))
    frequency = Counter(word for words in documents for word in words)
    mean = np.mean([sum(words.values()) for words in documents])
    entries = [
        (
            np.log(1 + (len(names) - frequency[word] + 0.5) / (frequency[word] + 0.5))
            * (count * (k1 + 1))
            / (count + k1 * (1 - b + b * sum(words.values()) / mean)),
            row,
            column[word],
        )
        for row, words in enumerate(documents)
        for word, count in words.items()
    ]
    values, rows, columns = map(np.array, zip(*entries, strict=True))
    weights = csr_matrix((values, (rows, columns)), shape=(len(names), len(column)))
    pairs = [(i, column[w]) for i, t in enumerate(texts) for w in {*words_of(t)} if w in column]
    rows, columns = np.array(pairs).T
    queries = csr_matrix((np.ones(len(pairs)), (rows, columns)), shape=(len(texts), len(column)))
    return csr_matrix(queries @ weights.T)


def measure(predictions: Predictions, corpus: Corpus, split: str, hidden: np.ndarray) -> dict:
    """Return the GZS metrics of predictions over all labels of the corpus."""
    truth = corpus.split(split).labels
    metrics = evaluate(predictions, corpus, split=split)
    kept = {name: metrics[name] for name in ("P@1", "P@3", "P@5", "PSP@5", "R@10", "R@100")}
    is_hidden = np.zeros(corpus.n_labels, dtype=bool)
    is_hidden[hidden] = True
    for name, mask in (("seen", ~is_hidden), ("hidden", is_hidden)):
        part = truth @ csr_matrix((mask.astype(np.float32), (range(len(mask)),) * 2))
        part.eliminate_zeros()
        rows = np.flatnonzero(np.diff(part.indptr))
        kept |= {
            f"{name} {k}": v
            for k, v in score(predictions.take(rows), part[rows], None, ["P@1", "R@10"]).items()
        }
    rows = np.flatnonzero(~np.asarray(truth[:, hidden].sum(axis=1) > 0).ravel())
    only_seen = score(predictions.take(rows), truth[rows], None, ["P@1"])
    kept["P@1 of points without hidden labels"] = only_seen["P@1"]
    first, second = kept["seen R@10"], kept["hidden R@10"]
    return kept | {"harmonic R@10": 2 * first * second / max(first + second, 1e-9)}


def zero_shot(predictions: Predictions, corpus: Corpus, split: str, hidden: np.ndarray) -> dict:
    """Return the ZS metrics of predictions of hidden labels."""
    truth = corpus.split(split).labels @ csr_matrix(
        (np.ones(len(hidden), np.float32), (hidden, hidden)), shape=(corpus.n_labels,) * 2
    )
    rows = np.flatnonzero(np.diff(csr_matrix(truth).indptr))
    metrics = score(predictions.take(rows), csr_matrix(truth)[rows], None, ["P@1", "R@10", "R@100"])
    return {f"ZS {name}": value for name, value in metrics.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--preset")
    parser.add_argument("--tune", action="store_true")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    corpus = hold_out(load_corpus(args.corpus), args.seed)
    novel, tuning = hide_labels(corpus, args.seed)
    seen = np.setdiff1d(np.arange(corpus.n_labels), np.concatenate([novel, tuning]))
    if not (args.out / "model").exists():
        config = EliasConfig.preset(args.preset) if args.preset else EliasConfig()
        small = select(corpus, seen, drop_empty=True)
        train(small, config.override({"seed": args.seed}), out=args.out, device="cpu")
    model = Elias.from_pretrained(args.out, device="cpu")
    labels = tuning if args.tune else novel
    split = "validation" if args.tune else "test"
    both = select(corpus, np.concatenate([seen, labels]))  # hidden labels come last
    hidden = np.arange(len(seen), both.n_labels)
    points = both.split(split)
    texts = list(points.texts)
    shape, names = (len(texts), both.n_labels), list(both.label_names)
    results: dict[str, dict] = {}

    def report(name: str, gzs: Predictions, zs: Predictions) -> None:
        results[name] = zero_shot(zs, both, split, hidden) | measure(gzs, both, split, hidden)
        shown = "  ".join(f"{key} {value:.2f}" for key, value in results[name].items())
        print(f"{name}: {shown}", flush=True)

    def only_hidden(matrix: csr_matrix) -> csr_matrix:
        part = matrix.tocsc(copy=True)
        part.data[: part.indptr[len(seen)]] = 0
        part = part.tocsr()
        part.eliminate_zeros()
        return part

    def from_scores(scores: np.ndarray) -> Predictions:
        top = np.argsort(-scores, axis=-1, kind="stable")[..., :100]
        ids = np.broadcast_to(top, (shape[0], 100))
        values = np.broadcast_to(np.take_along_axis(scores, top, axis=-1), ids.shape)
        return Predictions.from_scores(ids, values, both.n_labels, names)

    random = np.random.default_rng(args.seed)
    drawn = random.random(shape, dtype=np.float32)
    masked = np.where(np.arange(both.n_labels) >= len(seen), 1.0, -1.0)
    report("random", from_scores(drawn), from_scores(drawn * masked))
    counts = both.label_frequencies().astype(float)
    report("popularity", from_scores(counts), from_scores(counts * masked))
    matches = bm25(both.label_table, texts)
    report(
        "BM25",
        Predictions.from_csr(matches, 100, names),
        Predictions.from_csr(only_hidden(matches), 100, names),
    )
    before = model.predict(texts, top_k=100).among(names)
    none = Predictions.from_csr(csr_matrix(shape, dtype=np.float32), 100, names)
    report("before", before, none)
    for shots in SHOTS:
        examples = few_examples(both, hidden, shots, args.seed)
        start = time.perf_counter()
        larger = model.add_labels(both.label_table.take(hidden.tolist()), examples)
        seconds = time.perf_counter() - start
        after = larger.predict(texts, top_k=100)
        alone = larger.predict(texts, top_k=100, only=hidden.tolist())
        report(f"{shots} examples", after, alone)
        results[f"{shots} examples"]["seconds"] = seconds
    write_json(args.out, f"zero_shot_{split}.json", results)


if __name__ == "__main__":
    main()
