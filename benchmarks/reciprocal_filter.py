"""Copy wordnet-related with a filter file of its reciprocal pairs.

    PYTHONPATH=src python3 benchmarks/reciprocal_filter.py data/wordnet-related data/wordnet-one-way

Most relations of WordNet go both ways: a test text A has the label B, and the training text of B
has the label A. Such a pair (A, B) says little about texts of other corpora. The copy has links to
the files of the corpus and ``filter_labels_test.txt`` with these pairs, which are then no labels of
the test texts and are not counted as predictions. Test texts whose labels are all filtered should
be left out: ``evaluate(model.predict_split(corpus.test), corpus, empty="drop")``.
"""

import re
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

from elias import load_corpus


def synset(words_and_gloss: str) -> tuple[str, str]:
    """Return what a text and the name of its label have in common: three words, one sentence."""
    words, _, gloss = words_and_gloss.partition(": ")
    return ", ".join(words.split(", ")[:3]), gloss.split(";")[0].strip()


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    corpus = load_corpus(source)
    labels_of = defaultdict(list)
    for label, name in enumerate(corpus.label_names):
        labels_of[synset(re.sub(r" \([nvasr]\): ", ": ", name, count=1))].append(label)

    def pairs(split):
        """Yield the row of each text, the labels that name this text, and a label that it has."""
        for row, text in enumerate(split.texts):
            start, end = split.labels.indptr[row : row + 2]
            for label in split.labels.indices[start:end].tolist():
                yield row, labels_of[synset(text)], label

    in_training = {(own, label) for _, names, label in pairs(corpus.train) for own in names}
    reciprocal = [
        (row, label)
        for row, names, label in pairs(corpus.test)
        if any((label, own) in in_training for own in names)
    ]
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).symlink_to(path.resolve())
    np.savetxt(target / "filter_labels_test.txt", reciprocal, "%d")
    left = np.bincount([row for row, _ in reciprocal], minlength=len(corpus.test))
    n_empty = np.count_nonzero(left == np.diff(corpus.test.labels.indptr))
    print(f"{len(reciprocal):,} of {corpus.test.labels.nnz:,} test pairs are reciprocal; ", end="")
    print(f"{n_empty:,} of {len(corpus.test):,} test texts have no other label")


if __name__ == "__main__":
    main()
