"""Measure `elias labels add`: 1,000 labels into a model of 100,000 with random weights.

    python benchmarks/labels_add.py

Prints the seconds and the CPU seconds of the whole command, a new process that loads the model and
saves the larger one, without and with an example for each label.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from serve_memory import random_model

from elias.data.synthetic import pseudowords


def cpu_seconds():
    """Return the CPU time of all finished commands."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--labels", type=int, default=100_000)
    parser.add_argument("--weights", type=int, default=100, help="of the ranker, per label")
    parser.add_argument("--new", type=int, default=1000)
    given = parser.parse_args()
    words = pseudowords(1, 3 * given.new)
    names = [" ".join(words[3 * i : 3 * i + 3]) for i in range(given.new)]
    with tempfile.TemporaryDirectory() as folder:
        model, table = Path(folder, "model"), Path(folder, "new.txt")
        random_model(given).save_pretrained(model)
        table.write_text("\n".join(names) + "\n")
        examples = Path(folder, "examples.csv")
        rows = [f"a text about {name},{name}" for name in names]
        examples.write_text("\n".join(["text,labels", *rows]) + "\n")
        for more in ([], ["--examples", str(examples)]):
            command = [sys.executable, "-m", "elias", "labels", "add", str(model), str(table)]
            command += ["--out", str(Path(folder, "larger")), "--overwrite", *more]
            start, cpu_start = time.perf_counter(), cpu_seconds()
            subprocess.run(command, check=True)
            seconds, cpu = time.perf_counter() - start, cpu_seconds() - cpu_start
            print(f"{' '.join(more[:1]) or 'names alone'}: {seconds:.1f} s, {cpu:.1f} s of CPU")


if __name__ == "__main__":
    main()
