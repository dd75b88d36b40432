"""Use ELIAS as a scikit-learn estimator: pipeline, cross-validation, clone.

The texts are generated; put your own lists in their place. Labels are lists of names, or a sparse
indicator matrix.
"""
# ruff: noqa: T201 - an example shows what it finds

from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

from elias import EliasClassifier
from elias.data.synthetic import synthetic_corpus


def lower(texts: list[str]) -> list[str]:
    """Return the texts in lower case: any step that returns texts may come first."""
    return [text.lower() for text in texts]


corpus = synthetic_corpus(n_points=200, n_labels=20)
texts = list(corpus.train.texts or [])
labels = [[corpus.label_names[i] for i in row.indices] for row in corpus.train.labels]

classifier = EliasClassifier(epochs=1, device="cpu")
pipeline = make_pipeline(FunctionTransformer(lower), classifier)

print("P@1 of two folds:", cross_val_score(pipeline, texts, labels, cv=2))
print(pipeline.fit(texts, labels).predict(texts[:2]).shape)
print(pipeline[-1].predict_topk(texts[:2], k=3))
