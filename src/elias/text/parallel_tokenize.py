"""Tokenize texts on disk chunk by chunk, with several processes for words and n-grams.

The tokenizer of a transformer has its own threads. Words and n-grams are looked up in Python, where
threads do not help. Therefore several worker processes each tokenize a range of the texts:

    python -m elias.text.parallel_tokenize JOB BEGIN END PART

Unlike a ``multiprocessing`` process, a worker does not import the program that calls `elias.train`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from elias.data.atomic import ArrayWriter
from elias.data.storage import DiskTexts
from elias.errors import DataError
from elias.progress import progress, progress_disabled
from elias.text.vectorizer import Featurizer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elias.progress import Advance
    from elias.text.tokens import Tokens


_CHUNK = 8192  # texts at a time
_TEXTS_PER_WORKER = 50_000  # fewer are not worth another process
_JOB_FILE, _IDF_FILE, _ROWS_FILE = "job.json", "idf.npy", "rows.npy"
_ONE_THREAD = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def write_tokens(
    texts: DiskTexts,
    folder: Path,
    tokenize: Callable[[Sequence[str]], Tokens],
    featurizer: Featurizer | None,
) -> None:
    """Write the tokens of texts into an empty folder, in the format of `elias.text.tokens`.

    Args:
        texts: The texts.
        folder: The folder to write to.
        tokenize: Turns a list of texts into tokens.
        featurizer: The vocabulary that ``tokenize`` uses, for the worker processes; None if
            ``tokenize`` uses no vocabulary and must run in this process.
    """
    n_workers = min(_n_cores(), len(texts) // _TEXTS_PER_WORKER)
    with progress("Tokenizing", len(texts)) as advance:
        if featurizer is not None and n_workers > 1:
            _run_workers(texts, folder, featurizer, n_workers, advance)
        else:
            _write_range(texts, range(len(texts)), folder, tokenize, advance)


def _n_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _write_range(
    texts: DiskTexts,
    rows: range,
    folder: Path,
    tokenize: Callable[[Sequence[str]], Tokens],
    advance: Advance,
) -> None:
    """Write the tokens of a range of the texts."""
    lengths = [np.zeros(1, np.int64)]
    n_truncated = 0
    with (
        ArrayWriter(folder / "ids.npy", "<i4") as ids,
        ArrayWriter(folder / "weights.npy", "<f4") as weights,
        progress_disabled(),
    ):
        for start in range(rows.start, rows.stop, _CHUNK):
            tokens = tokenize(texts[start : min(start + _CHUNK, rows.stop)])
            ids.append(tokens.ids)
            if tokens.weights is not None:
                weights.append(tokens.weights)
            lengths.append(tokens.lengths)
            n_truncated += tokens.n_truncated
            advance(len(tokens))
    np.save(folder / "offsets.npy", np.cumsum(np.concatenate(lengths)))
    np.save(folder / "truncated.npy", np.int64(n_truncated))


def _run_workers(
    texts: DiskTexts, folder: Path, featurizer: Featurizer, n_workers: int, advance: Advance
) -> None:
    """Tokenize all texts with several processes, and concatenate the parts that they write."""
    job = folder / "job"
    _write_job(job, texts, featurizer)
    bounds = np.linspace(0, len(texts), n_workers + 1).astype(int).tolist()
    parts = [job / f"part-{number}" for number in range(n_workers)]
    workers = [_start(job, *each) for each in zip(bounds[:-1], bounds[1:], parts, strict=True)]
    with ThreadPoolExecutor(n_workers) as pool:
        try:
            list(pool.map(_follow, workers, parts, [advance] * n_workers))
        except BaseException:
            for worker in workers:
                worker.kill()
            raise
    lengths = [np.zeros(1, np.int64)]
    with (
        ArrayWriter(folder / "ids.npy", "<i4") as ids,
        ArrayWriter(folder / "weights.npy", "<f4") as weights,
    ):
        for part in parts:
            ids.append_file(part / "ids.npy")
            weights.append_file(part / "weights.npy")
            lengths.append(np.diff(np.load(part / "offsets.npy")))
            shutil.rmtree(part)
    np.save(folder / "offsets.npy", np.cumsum(np.concatenate(lengths)))
    np.save(folder / "truncated.npy", np.int64(0))
    shutil.rmtree(job)


def _write_job(job: Path, texts: DiskTexts, featurizer: Featurizer) -> None:
    job.mkdir()
    vocabulary = {
        "words": featurizer.words,
        "ngrams": featurizer.ngrams,
        "char_ngrams": featurizer.char_ngrams,
        "word_ngrams": featurizer.word_ngrams,
    }
    tree = {"texts": str(texts.folder.resolve()), "vocabulary": vocabulary}
    (job / _JOB_FILE).write_text(json.dumps(tree), encoding="utf8")
    np.save(job / _IDF_FILE, featurizer.idf)
    if texts.rows is not None:
        np.save(job / _ROWS_FILE, texts.rows)


def _start(job: Path, begin: int, end: int, part: Path) -> subprocess.Popen[str]:
    import elias

    part.mkdir()
    package = str(Path(elias.__file__).parent.parent)
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    settings = {"PYTHONPATH": path, **dict.fromkeys(_ONE_THREAD, "1")}
    command = [sys.executable, "-m", __name__, str(job), str(begin), str(end), str(part)]
    with (part / "stderr").open("wb") as stderr:
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, **settings},
        )


def _follow(worker: subprocess.Popen[str], part: Path, advance: Advance) -> None:
    """Wait for a worker process, and show its progress."""
    assert worker.stdout is not None
    with worker.stdout:
        for line in worker.stdout:
            advance(int(line))
    if worker.wait() != 0:
        output = (part / "stderr").read_text(encoding="utf8", errors="replace").strip()
        reason = output.splitlines()[-1] if output else f"exit code {worker.returncode}"
        raise DataError(f"a tokenizer process failed ({reason}); run the same command again")


def _work(job: Path, begin: int, end: int, part: Path) -> None:
    """Tokenize a range of texts into a folder; this function runs in a worker process."""
    from elias.text.tokens import Tokens

    tree = json.loads((job / _JOB_FILE).read_text(encoding="utf8"))
    featurizer = Featurizer(**tree["vocabulary"], idf=np.load(job / _IDF_FILE, allow_pickle=False))
    rows = job / _ROWS_FILE
    texts = DiskTexts(
        Path(tree["texts"]), "", np.load(rows, mmap_mode="r") if rows.exists() else None
    )

    def tokenize(chunk: Sequence[str]) -> Tokens:
        return Tokens.from_csr(featurizer.transform(chunk))

    def advance(steps: int = 1, note: str = "") -> None:
        del note
        print(steps, flush=True)  # noqa: T201 - the parent process counts them

    _write_range(texts, range(begin, end), part, tokenize, advance)


if __name__ == "__main__":
    _work(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
