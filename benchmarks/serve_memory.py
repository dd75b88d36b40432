"""Measure the memory of a server with 1, 2 and 4 workers.

    python benchmarks/serve_memory.py MODEL --texts FILE
    python benchmarks/serve_memory.py --labels 100000          # a model with random weights

RSS counts a page in every process that uses it; PSS divides it by the number of these processes, so
the sum over processes is the memory that the server takes. Both are read from Linux's
/proc/PID/smaps_rollup after every worker has answered. Also prints the median time of a request
with one text, one after the other, and a checksum of the answers.
"""

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import numpy as np
from cpu_predict import make_model
from scipy.sparse import csr_matrix
from serve_load import some_texts, workers_of

from elias.data.synthetic import pseudowords
from elias.rerank.reranker import Reranker
from elias.rerank.sparse_ranker import RankerFeatures, SparseRanker

PORT = 8377


def random_model(given):
    """Return a model with a ranker, both with random weights."""
    rng = np.random.default_rng(0)
    words = np.array(pseudowords(0, 30_000))
    drawn = (len(words) * rng.random((30_000, 12)) ** 3).astype(int)
    texts = [" ".join(row) for row in words[drawn]]
    elias = make_model(argparse.Namespace(encoder="bag", labels=given.labels), texts, rng)
    features = RankerFeatures.fit(texts, elias.config.rerank)
    shape = (given.labels, features.n_features)
    columns = np.sort(rng.integers(0, shape[1], (given.labels, given.weights), dtype=np.int32))
    starts = np.arange(given.labels + 1) * given.weights
    values = rng.standard_normal(columns.size, dtype=np.float32)
    weights = csr_matrix((values, columns.ravel(), starts), shape=shape)
    weights.sum_duplicates()
    elias.reranker = Reranker(
        features=features,
        ranker=SparseRanker.from_label_rows(weights, np.zeros(given.labels, dtype=np.float32), 0),
        frequencies=np.ones(given.labels, dtype=np.int64),
        calibration=None,
        transform="l3-hinge",
        mixture="sum",
    )
    return elias


def smaps(pid):
    """Return the memory of a process in MB, by kind."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {line.split(":")[0]: int(line.split()[1]) * 1024 / 1e6 for line in lines}


def get(path, body=None):
    headers = {"content-type": "application/json"}
    request = Request(f"http://127.0.0.1:{PORT}{path}", data=body, headers=headers)
    with urlopen(request, timeout=60) as answer:
        return answer.read()


def wait_for(n_workers, server):
    """Wait until all workers have loaded the model."""
    while server.poll() is None:
        try:
            lines = get("/metrics").decode().splitlines()
            if any(line == f"elias_workers {n_workers}.0" for line in lines):
                return
        except (URLError, ConnectionError):
            pass
        time.sleep(0.2)
    sys.exit("the server has stopped; start it with elias serve to see why")


def measure(model, n_workers, texts):
    """Return the memory of a server and the time of a text."""
    command = [sys.executable, "-m", "elias", "serve", str(model), "--port", str(PORT)]
    command += ["--workers", str(n_workers), "--device", "cpu"]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        wait_for(n_workers, server)
        seconds, answers = [], hashlib.sha256()
        for text in texts:
            body = json.dumps({"inputs": [text]}).encode()
            start = time.perf_counter()
            answer = get("/predict", body)
            seconds.append(time.perf_counter() - start)
            answers.update(answer)
        supervisor = smaps(server.pid)
        workers = [smaps(pid) for pid in workers_of(server.pid)]
    finally:
        server.terminate()
        server.wait()
    processes = [supervisor, *workers]
    workers = workers or [supervisor]
    return {
        "workers": n_workers,
        "rss_mb": sum(p["Rss"] for p in processes),
        "pss_mb": sum(p["Pss"] for p in processes),
        "worker_rss_mb": statistics.mean(p["Rss"] for p in workers),
        "worker_private_mb": statistics.mean(
            p["Private_Clean"] + p["Private_Dirty"] for p in workers
        ),
        "text_ms": 1000 * statistics.median(seconds),
        "answers": answers.hexdigest()[:12],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--labels", type=int, default=100_000, help="of a model that is built")
    parser.add_argument("--weights", type=int, default=100, help="of its ranker, per label")
    parser.add_argument("--texts", type=Path, help="file with one text per line")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--out", type=Path, help="file for the results as JSON")
    given = parser.parse_args()
    texts = some_texts(given.texts)[:500]
    with tempfile.TemporaryDirectory() as folder:
        model = given.model
        if model is None:
            model = random_model(given).save_pretrained(Path(folder) / "model")
        rows = []
        for n_workers in given.workers:
            row = measure(model, n_workers, texts)
            rows.append(row)
            print(
                json.dumps({k: round(v, 1) if isinstance(v, float) else v for k, v in row.items()}),
                flush=True,
            )
    if given.out:
        given.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
