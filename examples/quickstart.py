"""From a corpus to ranked label names in a dozen lines.

The corpus is generated, so that the example runs anywhere: put `load_corpus("your/file.csv")` (any
table with a text and a labels column) in its place.
"""
# ruff: noqa: T201 - an example shows what it finds

from elias import Elias, EliasConfig, evaluate, train
from elias.data.synthetic import synthetic_corpus

corpus = synthetic_corpus(n_points=600, n_labels=100)
config = EliasConfig().override({"encoder.dim": 64})
model = train(corpus, config, out="runs/quickstart", overwrite=True)

predictions = model.predict_split(corpus.split("test"), top_k=100)
print(evaluate(predictions, corpus))
print(predictions[0].labels[:3], predictions[0].scores[:3])

model.save_pretrained("runs/quickstart-model", overwrite=True)
model = Elias.from_pretrained("runs/quickstart-model")
print(model.predict(["any text", ""], top_k=2).to_dicts())
