"""Texts on disk to tokens on disk, a chunk at a time, words by several processes.

A tokenizer of a transformer works in threads of its own. Words and n-grams are looked up in Python,
which has one thread for it: there each worker is a process that takes a range of the texts,

    python -m elias.text.parallel_tokenize JOB BEGIN END PART

A process started so asks nothing of the program that calls `elias.train`, as one that
``multiprocessing`` starts would.
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
from elias.progress import hushed, progress
from elias.text.vectorizer import Featurizer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from elias.progress import Advance
    from elias.text.tokens import Tokens


_CHUNK = 8192  # texts at a time
_FEW = 50_000  # texts that are not worth a second process
_JOB, _FREQUENCIES, _ROWS = "job.json", "idf.npy", "rows.npy"
_ONE_THREAD = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def write_tokens(
    texts: DiskTexts,
    folder: Path,
    tokenise: Callable[[Sequence[str]], Tokens],
    featurizer: Featurizer | None,
) -> None:
    """Write the tokens of texts into an empty folder, as `elias.text.tokens` reads them.

    Args:
        texts: The texts.
        folder: Where to.
        tokenise: Turns some texts into tokens.
        featurizer: What ``tokenise`` looks words up in, so that workers can do the same; None
            where it is another kind of tokenizer.
    """
    n_workers = min(_n_cores(), len(texts) // _FEW)
    with progress("Tokenising", len(texts)) as advance:
        if featurizer is not None and n_workers > 1:
            _by_workers(texts, folder, featurizer, n_workers, advance)
        else:
            _by_itself(texts, folder, tokenise, advance)


def _n_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _by_itself(
    texts: DiskTexts,
    folder: Path,
    tokenise: Callable[[Sequence[str]], Tokens],
    advance: Advance,
) -> None:
    lengths: list[NDArray[np.int64]] = [np.zeros(1, np.int64)]
    n_truncated = 0
    with (
        ArrayWriter(folder / "ids.npy", "<i4") as ids,
        ArrayWriter(folder / "weights.npy", "<f4") as weights,
        hushed(),
    ):
        for start in range(0, len(texts), _CHUNK):
            tokens = tokenise(texts[start : start + _CHUNK])
            ids.append(tokens.ids)
            if tokens.weights is not None:
                weights.append(tokens.weights)
            lengths.append(tokens.lengths)
            n_truncated += tokens.n_truncated
            advance(len(tokens))
    _finish(folder, lengths, n_truncated)


def _finish(folder: Path, lengths: list[NDArray[np.int64]], n_truncated: int) -> None:
    np.save(folder / "offsets.npy", np.cumsum(np.concatenate(lengths)))
    np.save(folder / "truncated.npy", np.int64(n_truncated))


def _by_workers(
    texts: DiskTexts, folder: Path, featurizer: Featurizer, n_workers: int, advance: Advance
) -> None:
    job = folder / "job"
    _write_job(job, texts, featurizer)
    bounds = np.linspace(0, len(texts), n_workers + 1).astype(int).tolist()
    parts = [job / f"part-{number}" for number in range(n_workers)]
    workers = [
        _start(job, begin, end, part)
        for begin, end, part in zip(bounds[:-1], bounds[1:], parts, strict=True)
    ]
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
            ids.append_file(part / "ids.bin")
            weights.append_file(part / "weights.bin")
            lengths.append(np.load(part / "lengths.npy").astype(np.int64))
            shutil.rmtree(part)
    _finish(folder, lengths, 0)
    shutil.rmtree(job)


def _write_job(job: Path, texts: DiskTexts, featurizer: Featurizer) -> None:
    job.mkdir()
    described = {
        "texts": str(texts.folder.resolve()),
        "words": featurizer.words,
        "ngrams": featurizer.ngrams,
        "char_ngrams": featurizer.char_ngrams,
        "word_ngrams": featurizer.word_ngrams,
    }
    (job / _JOB).write_text(json.dumps(described), encoding="utf8")
    np.save(job / _FREQUENCIES, featurizer.idf)
    if texts.rows is not None:
        np.save(job / _ROWS, texts.rows)


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
    """Wait for a worker, telling how far it is."""
    assert worker.stdout is not None
    with worker.stdout:
        for line in worker.stdout:
            advance(int(line))
    if worker.wait() != 0:
        said = (part / "stderr").read_text(encoding="utf8", errors="replace").strip()
        last = said.splitlines()[-1] if said else f"exit code {worker.returncode}"
        raise DataError(f"a process that tokenises has failed ({last}); run the same command again")


def _work(job: Path, begin: int, end: int, part: Path) -> None:
    """Tokenise a range of texts into a folder; this is the worker."""
    described = json.loads((job / _JOB).read_text(encoding="utf8"))
    featurizer = Featurizer(
        words=tuple(described["words"]),
        ngrams=tuple(described["ngrams"]),
        idf=np.load(job / _FREQUENCIES, allow_pickle=False),
        char_ngrams=tuple(described["char_ngrams"]),
        word_ngrams=described["word_ngrams"],
    )
    rows = job / _ROWS
    texts = DiskTexts(
        Path(described["texts"]), "", np.load(rows, mmap_mode="r") if rows.exists() else None
    )
    lengths: list[NDArray[np.int32]] = []
    with (part / "ids.bin").open("wb") as ids, (part / "weights.bin").open("wb") as weights:
        for start in range(begin, end, _CHUNK):
            features = featurizer.transform(texts[start : min(start + _CHUNK, end)])
            ids.write(features.indices.astype("<i4").data)
            weights.write(features.data.astype("<f4").data)
            lengths.append(np.diff(features.indptr).astype(np.int32))
            print(features.shape[0], flush=True)  # noqa: T201 - what the parent counts
    np.save(part / "lengths.npy", np.concatenate([np.zeros(0, np.int32), *lengths]))


if __name__ == "__main__":
    _work(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
