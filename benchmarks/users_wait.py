"""Measure what users wait for on a CPU: one text, and a file of texts, beside linear peers.

    python benchmarks/users_wait.py MODEL --texts FILE
    python benchmarks/users_wait.py MODEL --texts FILE --before CHECKOUT [--before-model MODEL]
    python benchmarks/users_wait.py MODEL --texts FILE --data data/mesh-titles --peers PYTHON

Every contestant gets raw texts (one per line of FILE) and returns the five best labels: this
checkout, another one (``--before``), and XR-Linear (PECOS) and Parabel (omikuji), which are trained
on tf-idf vectors of a corpus with the interpreter of an environment that has them (see
``linear_peers.py``). One text is `Elias.predict([text])`, or a peer's vectorizer and prediction. A
file is JSON lines to JSON lines; models are loaded before.

Each contestant is a process of its own. They take turns, so that other work on the machine disturbs
all of them alike. ``CPU`` is the CPU time of all threads, which other work disturbs less.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUNDS = 10
WARM_UP = 1000  # texts, of which the results are not counted
TOP_K = 5


class EliasContestant:
    """A checkout of ELIAS; `PYTHONPATH` says which."""

    def __init__(self, model):
        import elias

        self.model = elias.Elias.from_pretrained(model)
        if hasattr(elias, "FileTask"):
            self.tools = elias.FileTask, elias.TextFile, elias.predict_file
        else:  # older checkouts
            from elias.data.text_rows import TextFile
            from elias.pipeline import FileTask, predict_file

            self.tools = FileTask, TextFile, predict_file

    def one(self, text):
        return self.model.predict([text], top_k=TOP_K)

    def file(self, source, out):
        file_task, text_file, predict_file = self.tools
        task = file_task.plan(text_file.find(source, text="text"), out)
        predict_file(self.model, task, top_k=TOP_K)


class Peer:
    """A linear model over tf-idf vectors of words, with the settings of `linear_peers.py`."""

    def __init__(self, data):
        import numpy as np
        from linear_peers import read_corpus
        from sklearn.feature_extraction.text import TfidfVectorizer

        texts, labels, *_ = read_corpus(Path(data))
        pattern = r"(?u)\b\w+\b"
        self.vectorizer = TfidfVectorizer(
            sublinear_tf=True, token_pattern=pattern, min_df=2, dtype=np.float32
        )
        self.train(self.vectorizer.fit_transform(texts), labels[:, labels.getnnz(axis=0) > 0])

    def one(self, text):
        return self.predict(self.vectorizer.transform([text]))

    def file(self, source, out):
        with Path(source).open(encoding="utf8") as lines:
            texts = [json.loads(line)["text"] for line in lines]
        rankings = self.predict(self.vectorizer.transform(texts))
        with Path(out).open("w", encoding="utf8") as file:
            for text, ranking in zip(texts, rankings, strict=True):
                labels = [{"id": int(label), "score": float(score)} for label, score in ranking]
                file.write(json.dumps({"text": text, "labels": labels}) + "\n")


class XRLinear(Peer):
    def train(self, vectors, labels):
        from pecos.xmc import Indexer, LabelEmbeddingFactory
        from pecos.xmc.xlinear.model import XLinearModel

        clusters = Indexer.gen(LabelEmbeddingFactory.create(labels, vectors, method="pifa"), seed=0)
        model = XLinearModel.train(vectors, labels.tocsc(), C=clusters)
        with tempfile.TemporaryDirectory() as folder:  # loaded for prediction, it is faster
            model.save(folder)
            self.model = XLinearModel.load(folder, is_predict_only=True)

    def predict(self, vectors):
        scores = self.model.predict(vectors, only_topk=TOP_K)
        ends = zip(scores.indptr, scores.indptr[1:], strict=False)
        return [list(zip(scores.indices[a:b], scores.data[a:b], strict=True)) for a, b in ends]


class Parabel(Peer):
    def train(self, vectors, labels):
        import omikuji
        from linear_peers import load_run_peer

        with tempfile.TemporaryDirectory() as folder:
            data = Path(folder, "train.txt")
            load_run_peer()._write_text(data, vectors, labels)
            self.model = omikuji.Model.train_on_data(str(data))

    def predict(self, vectors):
        rankings = []
        for a, b in zip(vectors.indptr, vectors.indptr[1:], strict=False):
            pairs = zip(vectors.indices[a:b].tolist(), vectors.data[a:b].tolist(), strict=True)
            rankings.append(self.model.predict(list(pairs), top_k=TOP_K))
        return rankings


KINDS = {"elias": EliasContestant, "xr-linear": XRLinear, "parabel": Parabel}


def answer(kind, argument):
    """Run a contestant: read a request per line, and write a line of JSON for each."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a peer prints its progress to stdout
    begin = time.perf_counter()
    contestant = KINDS[kind](argument)
    print(json.dumps({"seconds": time.perf_counter() - begin}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        walls, cpus = [], []
        work = [(contestant.one, text) for text in request.get("texts", ())]
        if "file" in request:
            work = [(contestant.file, *request["file"])]
        for function, *arguments in work:
            wall, cpu = time.perf_counter(), time.process_time()
            function(*arguments)
            walls.append(1000 * (time.perf_counter() - wall))
            cpus.append(1000 * (time.process_time() - cpu))
        print(json.dumps({"walls": walls, "cpus": cpus}), file=replies, flush=True)


class Process:
    """A contestant in a process of its own."""

    def __init__(self, name, kind, argument, *, python=sys.executable, source=None):
        environment = dict(os.environ)
        if source is not None:
            environment["PYTHONPATH"] = str(Path(source, "src").resolve())
        command = [python, __file__, "--answer", kind, str(argument)]
        pipe = subprocess.PIPE
        self.name = name
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        self.ready_s = self._read()["seconds"]
        self.one, self.files = {"walls": [], "cpus": []}, {"walls": [], "cpus": []}

    def ask(self, **request):
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def end(self):
        self._process.stdin.close()
        self._process.wait()

    def _read(self):
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name}: ended; run the command without a pipe to see why")
        return json.loads(line)


def measure(contestants, texts, n_one, n_file, folder):
    """Let the contestants take turns, first with single texts, then with a file."""
    for one in contestants:
        one.ask(texts=texts[-WARM_UP:])  # what is made at the first call, caches of words
    for number in range(ROUNDS):
        part = [texts[i % len(texts)] for i in range(number, n_one, ROUNDS)]
        for one in contestants:
            for name, values in one.ask(texts=part).items():
                one.one[name] += values
    source = Path(folder, "texts.jsonl")
    lines = (json.dumps({"text": texts[i % len(texts)]}) + "\n" for i in range(n_file))
    source.write_text("".join(lines), encoding="utf8")
    for number in range(3):
        for i, one in enumerate(contestants):
            out = str(Path(folder, f"{number}-{i}.jsonl"))
            for name, values in one.ask(file=[str(source), out]).items():
                one.files[name] += [value / n_file for value in values]


def percentile(values, share):
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def report(contestants):
    """Print a table; ratios are by the median of one text and by the fastest file, to the first."""
    print("| | one text, p50 ms | p99 ms | CPU ms | ratio | file, ms a text | CPU ms | ratio |")
    print("| --- " * 8 + "|")
    rows = []
    for each in contestants:
        p50, p99 = (percentile(each.one["walls"], share) for share in (0.5, 0.99))
        cpu, file = percentile(each.one["cpus"], 0.5), min(each.files["walls"])
        rows.append((p50, p99, cpu, file, min(each.files["cpus"])))
        first = rows[0]
        print(
            f"| {each.name} | {p50:.2f} | {p99:.2f} | {cpu:.2f} | {p50 / first[0]:.2f} | "
            f"{file:.3f} | {rows[-1][4]:.3f} | {file / first[3]:.2f} |"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder of a saved model")
    parser.add_argument("--texts", type=Path, required=True, help="one text per line")
    parser.add_argument("--before", type=Path, help="another checkout to compare with")
    parser.add_argument("--before-model", help="its model, if it cannot load MODEL")
    parser.add_argument("--peers", help="interpreter of an environment with the peers")
    parser.add_argument("--data", help="corpus on which the peers are trained")
    parser.add_argument("--one", type=int, default=1000, help="single texts")
    parser.add_argument("--file", type=int, default=20_000, help="texts of the file")
    given = parser.parse_args()
    texts = [line for line in given.texts.read_text("utf8").splitlines() if line]
    checkout = Path(__file__).parents[1]
    contestants = [Process("ELIAS", "elias", given.model, source=checkout)]
    if given.before:
        model = given.before_model or given.model
        contestants.append(Process("ELIAS, before", "elias", model, source=given.before))
    if given.peers:
        for name, kind in (("XR-Linear", "xr-linear"), ("Parabel", "parabel")):
            contestants.append(Process(name, kind, given.data, python=given.peers))
    with tempfile.TemporaryDirectory() as folder:
        measure(contestants, texts, given.one, given.file, folder)
    report(contestants)
    for each in contestants:
        each.end()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--answer"]:
        answer(*sys.argv[2:])
    else:
        main()
