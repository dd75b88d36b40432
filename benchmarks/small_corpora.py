"""Compare ``elias train`` with tuned linear models on small corpora (2 to 50 labels).

    PYTHONPATH=src python3 benchmarks/small_corpora.py data/sms-spam --out RESULTS
    PYTHONPATH=src python3 benchmarks/small_corpora.py data/sms-spam -- --set index.kind=all

Each corpus is a folder with a training and a test split (see ``public_corpora.py``). What follows
``--`` goes to ``elias train``, which otherwise runs with its defaults, on the CPU.

The other side: LinearSVC, SGDClassifier and LogisticRegression, one-vs-rest, on tf-idf of words,
of characters and of both. For each metric the best of them by 3-fold cross-validation on the
training points is trained on all of these. For F1, it predicts the labels above a threshold, or the
best label of each point, whichever has the higher F1 on the held-out predictions; ours predicts
with the thresholds ``f1`` and ``macro-f1``. P@1 is the mean over test points with labels. Seconds
cover the whole search, or ``elias train`` as a command.
"""

import argparse
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
from cpu_setup import write_json
from joblib import Parallel, cpu_count, delayed
from scipy import sparse
from sklearn.exceptions import ConvergenceWarning
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression, SGDClassifier
from sklearn.model_selection import KFold
from sklearn.svm import LinearSVC

from elias import Elias, load_corpus

FOLDS = 3
WORDS = {"sublinear_tf": True, "token_pattern": r"(?u)\b\w+\b", "dtype": np.float32}
CHARACTERS = {"sublinear_tf": True, "analyzer": "char_wb", "ngram_range": (2, 5), "min_df": 2}
FEATURES = {
    "words": [WORDS],
    "words 1-2": [WORDS | {"ngram_range": (1, 2)}],
    "characters": [CHARACTERS | {"dtype": np.float32}],
    "words 1-2 and characters": [
        WORDS | {"ngram_range": (1, 2)},
        CHARACTERS | {"dtype": np.float32},
    ],
}
CLASSIFIERS = {
    "LinearSVC C=0.1": lambda: LinearSVC(C=0.1),
    "LinearSVC C=1": lambda: LinearSVC(C=1.0),
    "SGD alpha=1e-5": lambda: SGDClassifier(loss="log_loss", alpha=1e-5, random_state=0),
    "SGD alpha=1e-4": lambda: SGDClassifier(loss="log_loss", alpha=1e-4, random_state=0),
    "logistic regression C=1": lambda: LogisticRegression(C=1.0, solver="liblinear"),
    "logistic regression C=10": lambda: LogisticRegression(C=10.0, solver="liblinear"),
}
METRICS = ("P@1", "micro-F1", "macro-F1")
THRESHOLDS = np.geomspace(0.25, 2.5, 60)
"""Numbers of predicted labels to try, as multiples of the number of true labels."""


def vectorize(name, train_texts, test_texts):
    vectorizers = [TfidfVectorizer(**options) for options in FEATURES[name]]
    train = sparse.hstack([vectorizer.fit_transform(train_texts) for vectorizer in vectorizers])
    test = sparse.hstack([vectorizer.transform(test_texts) for vectorizer in vectorizers])
    return train.tocsr(), test.tocsr()


def score(classifier, train, labels, test):
    """Return scores (N, L) of the test points; labels on no or on all points are constant."""
    scores = np.empty((test.shape[0], labels.shape[1]))
    for label, truth in enumerate(labels.T):
        if truth.all() or not truth.any():
            scores[:, label] = np.inf if truth.any() else -np.inf
        else:
            fitted = CLASSIFIERS[classifier]().fit(train, truth)
            scores[:, label] = fitted.decision_function(test)
    return scores


def score_all(features, texts, labels, train, test):
    """Return the scores of every classifier; ``train`` and ``test`` are rows."""
    warnings.simplefilter("ignore", ConvergenceWarning)
    inputs = vectorize(features, [texts[row] for row in train], [texts[row] for row in test])
    return {name: score(name, inputs[0], labels[train], inputs[1]) for name in CLASSIFIERS}


def best_label(scores):
    return np.arange(scores.shape[1]) == scores.argmax(axis=1)[:, None]


def measure(metric, predicted, truth):
    """Return a metric in percent; for P@1, ``predicted`` has the best label of each point."""
    hits = (predicted & truth).sum(axis=0)
    if metric == "P@1":
        return 100 * hits.sum() / truth.any(axis=1).sum()
    totals = predicted.sum(axis=0) + truth.sum(axis=0)
    if metric == "micro-F1":
        return 100 * 2 * hits.sum() / totals.sum()
    return 100 * np.mean(2 * hits / np.maximum(totals, 1))


def choose_threshold(metric, scores, truth):
    """Return the best value of the metric and its threshold, which is None for the best label."""
    best = measure(metric, best_label(scores), truth), None
    if metric == "P@1":
        return best
    descending = np.sort(scores, axis=None)[::-1]
    for n_predicted in (THRESHOLDS * truth.sum()).astype(int):
        threshold = descending[min(n_predicted, len(descending) - 1)]
        value = measure(metric, scores >= threshold, truth)
        best = max(best, (value, threshold), key=lambda choice: choice[0])
    return best


def linear(corpus, truth):
    """Return each metric of the linear model that cross-validation chooses for it."""
    begin = time.perf_counter()
    texts, labels = corpus.train.texts, corpus.train.labels.toarray() > 0
    folds = list(KFold(FOLDS, shuffle=True, random_state=0).split(texts))
    parallel = Parallel(n_jobs=cpu_count())
    tasks = [(features, *fold) for features in FEATURES for fold in folds]
    parts = parallel(
        delayed(score_all)(features, texts, labels, train, test) for features, train, test in tasks
    )
    held_out = {}
    for (features, _, test), scores in zip(tasks, parts, strict=True):
        for name in CLASSIFIERS:
            held_out.setdefault((features, name), np.empty(labels.shape))[test] = scores[name]
    result = {"model": {}}
    test_scores = {}
    for metric in METRICS:
        choices = {key: choose_threshold(metric, held_out[key], labels) for key in held_out}
        features, name = key = max(choices, key=lambda key: choices[key][0])
        if key not in test_scores:
            inputs = vectorize(features, texts, corpus.test.texts)
            test_scores[key] = score(name, inputs[0], labels, inputs[1])
        threshold = choices[key][1]
        scores = test_scores[key]
        predicted = best_label(scores) if threshold is None else scores >= threshold
        result[metric] = round(float(measure(metric, predicted, truth)), 2)
        result["model"][metric] = f"{name}, {features}"
    result["seconds"] = round(time.perf_counter() - begin, 1)
    return result


def ours(data, corpus, truth, options):
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "elias", "-q", "train", str(data)]
        begin = time.perf_counter()
        subprocess.run(
            [*command, "--device", "cpu", "--out", f"{folder}/run", *options],
            check=True,
            stdout=sys.stderr,
        )
        seconds = time.perf_counter() - begin
        model = Elias.from_pretrained(Path(folder) / "run", device="cpu")
        texts = list(corpus.test.texts)
        best = model.predict(texts, top_k=1)
        chosen = dict.fromkeys(METRICS, best)
        if model.probabilities is not None:
            chosen["micro-F1"] = model.predict(texts, threshold="f1")
            chosen["macro-F1"] = model.predict(texts, threshold="macro-f1")
    result = {"model": " ".join(["elias train", *options])}
    for metric, labels in chosen.items():
        matrix = labels.among(corpus.label_names).to_csr()
        matrix.data = np.ones(len(matrix.data), dtype=bool)
        result[metric] = round(float(measure(metric, matrix.toarray(), truth)), 2)
    return result | {"seconds": round(seconds, 1)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", nargs="+", type=Path, help="corpora with a test split")
    parser.add_argument("--out", type=Path, help="folder for the results as JSON")
    parser.add_argument("--only", choices=("elias", "linear"), help="run one side")
    arguments, options = sys.argv[1:], []
    if "--" in arguments:
        split = arguments.index("--")
        arguments, options = arguments[:split], arguments[split + 1 :]
    arguments = parser.parse_args(arguments)
    columns = (*METRICS, "seconds")
    print(f"| corpus | model | {' | '.join(columns)} |")
    print(f"| --- | --- |{' --- |' * len(columns)}")
    results = {}
    for data in arguments.data:
        corpus = load_corpus(data)
        if corpus.test is None or corpus.test.texts is None:
            parser.error(
                f"{data} has no test texts: give a folder with a training and a test split"
            )
        truth = corpus.test.labels.toarray() > 0
        sides = results[data.name] = {}
        if arguments.only != "linear":
            sides["elias"] = ours(data, corpus, truth, options)
        if arguments.only != "elias":
            sides["linear"] = linear(corpus, truth)
        for name, side in sides.items():
            values = " | ".join(str(side[column]) for column in columns)
            print(f"| {data.name} | {name} | {values} |", flush=True)
        write_json(arguments.out, "small_corpora.json", results)


if __name__ == "__main__":
    main()
