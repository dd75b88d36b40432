"""Measure labels that a model has never seen, and labels added with a few examples.

    PYTHONPATH=src python3 benchmarks/zero_shot.py data/mesh-titles --out RUNS/zero-shot

For each seed, a tenth of the labels that have test points is hidden: their columns are removed
from the training points, a model is trained on the rest (or loaded, if ``--out`` has one), and the
hidden labels are added by their texts, with 0, 1 and 5 examples. For tuning, a second tenth of the
labels is hidden, and 2,000 training points are set aside: with ``--tune``, these labels are
measured on these points instead of the test points.

ZS: points with a hidden label, ranking only hidden labels. GZS: all points, all labels; R@10 of
seen and of hidden labels and their harmonic mean. Beside them: random; popularity, which knows the
hidden training counts; BM25 on names; with ``--encoder``, the cosine of a frozen encoder; with
``--one-vs-all``, a one-vs-all model of the seen labels; with ``--retrain 5``, a model that is
trained again with up to 5 examples of each hidden label, instead of adding them. ``seen P@1``
counts only seen labels as relevant, so that a correct hidden label on the first rank is a loss;
P@1 of points without hidden labels is not. Means over the seeds are printed at the end.

Filters of the corpus are applied (``reciprocal_filter.py`` writes some); test points whose labels
are all filtered are left out. ``--set`` and ``--device`` are as in ``elias train``.
"""

import argparse
import logging
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
from cpu_setup import write_json
from scipy.sparse import csr_matrix, diags

from elias import Corpus, Elias, EliasConfig, LabelTable, load_corpus, train
from elias.config.io import parse_override
from elias.kernels.device import pick_device
from elias.metrics import evaluate, score
from elias.model.batch_inference import embed_all
from elias.model.encoder import build_encoder
from elias.predictions import Predictions
from elias.rerank.sparse_ranker import unit_embedding
from elias.text.vectorizer import words_of

SHARE = 0.1
TUNING_POINTS = 2000
SHOTS = (0, 1, 5)


def load(folder: str) -> Corpus:
    """Return a corpus whose labels have ids, without the test points that have no labels."""
    corpus = load_corpus(folder)
    table = corpus.label_table
    if table.ids is None:  # names may repeat
        table = replace(table, ids=tuple(map(str, range(len(table)))))
    rows = np.flatnonzero(np.diff(corpus.test.labels.indptr))
    return replace(corpus.with_splits(test=corpus.test.take(rows)), label_names=table)


def hide_labels(corpus: Corpus, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the labels to test with and those to tune with, both drawn from those tested."""
    tested = np.flatnonzero(np.bincount(corpus.test.labels.indices, minlength=corpus.n_labels))
    order = np.random.default_rng(seed).permutation(tested)
    count = round(SHARE * len(tested))
    return np.sort(order[:count]), np.sort(order[count : 2 * count])


def select(corpus: Corpus, labels: np.ndarray, *, drop_empty: bool = False) -> Corpus:
    """Return the corpus over some labels, optionally without points that have none of them."""
    splits, new_ids = {}, np.full(corpus.n_labels, -1)
    new_ids[labels] = np.arange(len(labels))
    for name, split in corpus.splits.items():
        columns, filters = split.labels[:, labels], split.filters
        if filters is not None:
            filters = np.stack([filters[:, 0], new_ids[filters[:, 1]]], axis=1)
            filters = filters[filters[:, 1] >= 0]
        splits[name] = replace(split, labels=columns, filters=filters)
        if drop_empty and name != "test":
            splits[name] = splits[name].take(np.flatnonzero(np.diff(columns.indptr)))
    names = corpus.label_table.take(labels.tolist())
    return replace(corpus.with_splits(**splits), label_names=names)


def set_aside(corpus: Corpus, seed: int) -> Corpus:
    """Return the corpus with some of its training points as validation points."""
    order = np.random.default_rng(seed).permutation(len(corpus.train))
    rows = np.sort(order[:TUNING_POINTS]), np.sort(order[TUNING_POINTS:])
    points, rest = map(corpus.train.take, rows)
    return corpus.with_splits(train=rest, validation=points)


def few_examples(corpus: Corpus, labels: np.ndarray, count: int, seed: int) -> dict:
    """Return up to ``count`` training texts of each label, by its id."""
    columns, random = corpus.train.labels.tocsc(), np.random.default_rng(seed)
    examples = {}
    for label in labels.tolist():
        rows = random.permutation(columns[:, label].indices)[:count]
        examples[corpus.label_table.id(label)] = [corpus.train.texts[row] for row in rows]
    return examples


def with_examples(corpus: Corpus, hidden: np.ndarray, count: int, seed: int) -> Corpus:
    """Return the corpus with only the `few_examples` of the hidden labels."""
    random, labels = np.random.default_rng(seed), corpus.train.labels.tocsc()
    for label in hidden.tolist():
        span = slice(labels.indptr[label], labels.indptr[label + 1])
        rows = random.permutation(labels.indices[span])[:count]
        labels.data[span] *= np.isin(labels.indices[span], rows)
    labels = labels.tocsr()
    labels.eliminate_zeros()
    rows = np.flatnonzero(np.diff(labels.indptr))
    return corpus.with_splits(train=replace(corpus.train, labels=labels).take(rows))


class FrozenEncoder:
    """A pretrained encoder, which encodes each text once."""

    def __init__(self, folder: str, device: str) -> None:
        config = EliasConfig().override({"encoder.model": folder}).resolve(1, 1)
        self.encoder = build_encoder(config.encoder, [], None).to(pick_device(device))
        self.encoder.prepare(pick_device(device))
        self.known: dict[str, np.ndarray] = {}

    def __call__(self, texts: list[str]) -> np.ndarray:
        """Return the embeddings of texts, of length 1."""
        new = list({text: None for text in texts if text not in self.known})
        if new:
            embeddings = unit_embedding(embed_all(self.encoder, self.encoder.tokenize(new)))
            self.known.update(zip(new, embeddings, strict=True))
        return np.stack([self.known[text] for text in texts])


class BM25:
    """BM25 scores of label names (documents) for texts (queries)."""

    def __init__(self, names: LabelTable, texts: list[str], k1: float = 1.2, b: float = 0.75):
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
        self.weights = csr_matrix((values, (rows, columns)), shape=(len(names), len(column)))
        pairs = [(i, column[w]) for i, t in enumerate(texts) for w in {*words_of(t)} if w in column]
        rows, columns = np.array(pairs).T
        shape = (len(texts), len(column))
        self.queries, self.names = csr_matrix((np.ones(len(pairs)), (rows, columns)), shape), names

    def rank(self, labels: np.ndarray, top_k: int) -> Predictions:
        """Return the best of the labels for each text."""
        weights = (
            diags(np.isin(np.arange(len(self.names)), labels).astype(float)) @ self.weights
        ).T
        blocks = [  # at a time, to bound memory
            Predictions.from_csr(self.queries[i : i + 100] @ weights, top_k, self.names)
            for i in range(0, self.queries.shape[0], 100)
        ]
        return Predictions.stack(blocks)


def measure(predictions: Predictions, corpus: Corpus, split: str, hidden: np.ndarray) -> dict:
    """Return the GZS metrics of predictions over all labels of the corpus."""
    truth = corpus.split(split).labels
    metrics = evaluate(predictions, corpus, split=split)
    results = {name: metrics[name] for name in ("P@1", "P@3", "P@5", "PSP@5", "R@10", "R@100")}
    is_hidden = np.zeros(corpus.n_labels, dtype=bool)
    is_hidden[hidden] = True
    for name, mask in (("seen", ~is_hidden), ("hidden", is_hidden)):
        part = truth @ csr_matrix((mask.astype(np.float32), (range(len(mask)),) * 2))
        part.eliminate_zeros()
        rows = np.flatnonzero(np.diff(part.indptr))
        results |= {
            f"{name} {k}": v
            for k, v in score(predictions.take(rows), part[rows], None, ["P@1", "R@10"]).items()
        }
    rows = np.flatnonzero(~np.asarray(truth[:, hidden].sum(axis=1) > 0).ravel())
    only_seen = score(predictions.take(rows), truth[rows], None, ["P@1"])
    results["P@1 of points without hidden labels"] = only_seen["P@1"]
    first, second = results["seen R@10"], results["hidden R@10"]
    return results | {"harmonic R@10": 2 * first * second / max(first + second, 1e-9)}


def zero_shot(predictions: Predictions, corpus: Corpus, split: str, hidden: np.ndarray) -> dict:
    """Return the ZS metrics of predictions of hidden labels."""
    truth = corpus.split(split).labels @ csr_matrix(
        (np.ones(len(hidden), np.float32), (hidden, hidden)), shape=(corpus.n_labels,) * 2
    )
    rows = np.flatnonzero(np.diff(csr_matrix(truth).indptr))
    metrics = score(predictions.take(rows), csr_matrix(truth)[rows], None, ["P@1", "R@10", "R@100"])
    return {f"ZS {name}": value for name, value in metrics.items()}


def trained(corpus: Corpus, config: EliasConfig, out: Path, device: str) -> tuple[Elias, float]:
    """Return a model, trained unless it is in ``out``, and the seconds of its training."""
    if not (out / "model").exists():
        train(corpus, config, out=out, device=device)
    model = Elias.from_pretrained(out, device=device)
    if list(model.label_names) != list(corpus.label_names):
        raise SystemExit(f"{out}: this model hides other labels; give another --out")
    return model, sum(model.metadata["timings"].values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--preset")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--encoder", help="folder of a pretrained encoder")
    parser.add_argument("--one-vs-all", action="store_true")
    parser.add_argument("--retrain", type=int, nargs="*", default=(), metavar="SHOTS")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    corpus = load(args.corpus)
    frozen = FrozenEncoder(args.encoder, args.device) if args.encoder else None
    split = "validation" if args.tune else "test"
    results = [measure_seed(corpus, seed, split, frozen, args) for seed in args.seeds]
    means = {}
    for row, first in results[0].items():
        means[row] = {key: np.mean([result[row][key] for result in results]) for key in first}
        show(f"mean of {len(results)}, {row}", means[row])
    write_json(args.out, f"zero_shot_{split}.json", {"seeds": results, "mean": means})


def show(row: str, metrics: dict) -> None:
    print(f"{row}: " + "  ".join(f"{k} {value:.2f}" for k, value in metrics.items()), flush=True)


def measure_seed(
    corpus: Corpus, seed: int, split: str, frozen: FrozenEncoder | None, args: argparse.Namespace
) -> dict[str, dict]:
    """Return the metrics of each row of the table for one seed."""
    out = args.out / f"seed-{seed}"
    corpus = set_aside(corpus, seed)
    novel, tuning = hide_labels(corpus, seed)
    seen = np.setdiff1d(np.arange(corpus.n_labels), np.concatenate([novel, tuning]))
    changes = dict(map(parse_override, args.set)) | {"seed": seed}
    config = EliasConfig.preset(args.preset) if args.preset else EliasConfig()
    config = config.override(changes)
    known = select(corpus, seen, drop_empty=True).with_splits(validation=None)
    model, training_seconds = trained(known, config, out, args.device)
    labels = novel if split == "test" else tuning
    both = select(corpus, np.concatenate([seen, labels]))  # hidden labels come last
    hidden = np.arange(len(seen), both.n_labels)
    points = both.split(split)
    texts = list(points.texts)
    shape, names = (len(texts), both.n_labels), both.label_table
    filters = np.empty((0, 2), int) if points.filters is None else points.filters
    top_k = 100 + points.max_filtered
    results: dict[str, dict] = {}

    def report(name: str, gzs: Predictions, zs: Predictions, seconds: float = 0) -> None:
        gzs, zs = gzs.drop(filters), zs.drop(filters)
        results[name] = zero_shot(zs, both, split, hidden) | measure(gzs, both, split, hidden)
        results[name]["seconds"] = seconds
        show(f"seed {seed}, {name}", results[name])

    def ranked(ids: np.ndarray, scores: np.ndarray) -> Predictions:
        ids, scores = (np.broadcast_to(part, (shape[0], top_k)) for part in (ids, scores))
        return Predictions.from_scores(ids, scores, both.n_labels, names)

    def most_frequent(labels: np.ndarray) -> Predictions:
        counts = both.label_frequencies()[labels].astype(float)
        top = np.argsort(-counts, kind="stable")[:top_k]
        return ranked(labels[top], counts[top])

    def draw(labels: np.ndarray) -> Predictions:
        """Return some of the labels for each text, in random order."""
        rows = np.stack([random.choice(labels, top_k, replace=False) for _ in texts])
        return ranked(rows, np.linspace(1, 0.1, top_k))

    def nearest(embedding: np.ndarray, directions: np.ndarray, labels: np.ndarray) -> Predictions:
        ids, scores = np.empty((len(texts), top_k), int), np.empty((len(texts), top_k))
        for start in range(0, len(texts), 1000):  # at a time, to bound memory
            rows = slice(start, start + 1000)
            cosines = embedding[rows] @ directions[labels].T
            top = np.argpartition(-cosines, top_k - 1, axis=1)[:, :top_k]
            ids[rows], scores[rows] = labels[top], np.take_along_axis(cosines, top, axis=1)
        return ranked(ids, scores)

    random, every_label = np.random.default_rng(seed), np.arange(both.n_labels)
    report("random", draw(every_label), draw(hidden))
    report("popularity", most_frequent(every_label), most_frequent(hidden))
    matches = BM25(names, texts)
    report("BM25", matches.rank(every_label, top_k), matches.rank(hidden, top_k))
    if frozen is not None:
        parts = frozen(texts), frozen(names.texts())
        report("frozen encoder", nearest(*parts, every_label), nearest(*parts, hidden))
    none = Predictions.from_csr(csr_matrix(shape, dtype=np.float32), top_k, names)
    if args.one_vs_all:
        every = EliasConfig().override(changes | {"index.kind": "all"})
        other, seconds = trained(known, every, out / "one-vs-all", args.device)
        report("one-vs-all", other.predict(texts, top_k=top_k).among(names), none, seconds)
    report("before", model.predict(texts, top_k=top_k).among(names), none, training_seconds)
    for shots in SHOTS:
        examples = few_examples(both, hidden, shots, seed)
        start = time.perf_counter()
        larger = model.add_labels(names.take(hidden.tolist()), examples)
        seconds = time.perf_counter() - start
        after = larger.predict(texts, top_k=top_k)
        alone = larger.predict(texts, top_k=top_k, only=hidden.tolist())
        report(f"{shots} examples", after, alone, seconds)
    for shots in args.retrain:
        few = with_examples(both, hidden, shots, seed).with_splits(validation=None)
        other, seconds = trained(few, config, out / f"retrained-{shots}", args.device)
        after = other.predict(texts, top_k=top_k)
        alone = other.predict(texts, top_k=top_k, only=hidden.tolist())
        report(f"retrained, {shots} examples", after, alone, seconds)
    return results


if __name__ == "__main__":
    main()
