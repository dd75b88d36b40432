"""The inputs and cases of `frozen_run.py`: settings, files, commands and requests."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SMALL = {
    **{"encoder.dim": 16, "encoder.hidden_dim": 16, "rerank.candidates": 20, "seed": 5},
    **{"stages.stage1.epochs": 2, "stages.stage2.epochs": 3, "eval.validation_size": 40},
    **{"stages.stage1.batch_size": 64, "stages.stage2.batch_size": 64},
}
ALL = {k: v for k, v in SMALL.items() if "stage" not in k} | {
    **{"index.kind": "all", "stages.one-vs-all.epochs": 3, "stages.one-vs-all.batch_size": 64},
}
BERT = {
    **{"encoder.model": "inputs/bert", "rerank.enabled": "false", "index.kind": "graph"},
    **{"stages.stage1.epochs": 1, "stages.stage2.epochs": 2, "eval.validation_size": 40, "seed": 5},
}
COMMANDS = """
demo
train
evaluate
predict
explain
report
serve
calibrate
info
presets
push
export
data
data info
data convert
data demo
data synthetic
experiment
experiment ablation
experiment compare
experiment sweep
experiment prune""".splitlines()
FILES = {
    "articles.csv": "title,tags\ncod quotas,fishing|North Sea\nwine law,labelling|wine\noil,oil\n",
    "semicolon.tsv": "text\tlabels\nred cod\tfish, salted; trade\nwine\ttrade\n",
    "articles.jsonl": '{"text": "cod quotas", "labels": ["fish", "sea"], "split": "train"}\n'
    '{"text": "oil rigs", "labels": ["sea"], "split": "test"}\n',
    "by-row/train.jsonl": '{"text": "cod", "labels": [0, 1]}\n{"text": "oil", "labels": [1, 2]}\n',
    "by-row/labels.txt": "fishing quota\nNorth Sea\noil\n",
    "pecos.txt": "0,1\tcod quotas in the north sea\n1,2\toil rigs off the coast\n",
    "sparse.txt": "4 4 2\n0,1 0:0.5 3:1\n1 1:2\n0 2:1 3:0.1\n0,1 0:1\n",
    "lf/trn.json": '{"uid": "a", "title": "cod", "content": "in the sea", "target_ind": [0, 1]}\n'
    '{"uid": "b", "title": "oil rigs", "content": "", "target_ind": [1]}\n',
    "lf/lbl.json": '{"uid": "0", "title": "fish"}\n{"uid": "1", "title": "North Sea"}\n',
    **{"empty.csv": "", "no-text.csv": "name;colour\ncod;grey\n", "bad.toml": "seed = \n"},
    **{"cells.csv": "text,labels\ncod, salted,fish\n", "cut.jsonl": '{"text": "cod", "labels": ['},
    **{"bare.csv": "text,labels\ncod,\n", "range.txt": "1 4 2\n5 0:1\n", "typo.toml": "sed = 1\n"},
}
WRONG = """nosuchcommand
train
train inputs/corpus
train inputs/corpus --out runs/x --set index.bta=20
train inputs/corpus --out runs/x --set encoder.pooling=max
train inputs/corpus --out runs/x --set stages.stage3.epochs=1
train inputs/corpus --out runs/x --set index.n_clusters=4000
train inputs/corpus --out runs/x --preset balance
train inputs/corpus --out runs/x --config inputs/bad.toml
train inputs/corpus --out runs/x --config inputs/typo.toml
train inputs/corpus --out runs/x --device tpu
train inputs/corpus --out runs/x --test-size 2.5
train inputs/corpus --out runs/bag
train inputs/bare.csv --out runs/x
predict runs/nowhere inputs/texts.txt
predict runs/bag inputs/texts.txt -k 0
predict runs/bag inputs/texts.txt --component stage9
predict runs/bag inputs/texts.txt --only nosuchlabel
predict runs/bag inputs/texts.txt --threshold precision=2
predict runs/bag inputs/texts.txt --format csv
predict runs/bag inputs/nowhere.txt
evaluate runs/bag inputs/corpus --split nosuch
evaluate runs/bag inputs/articles.csv --split validation
explain runs/bag text --member 9
export runs/bag out.onnx
serve runs/nowhere
info inputs/corpus
data info inputs/nowhere
data info inputs/articles.csv --labels tag
data info inputs/empty.csv
data info inputs/no-text.csv
data info inputs/cells.csv
data info inputs/cut.jsonl
data info inputs/range.txt
data info inputs/corpus --text title
data convert inputs/articles.csv inputs/articles.jsonl
data convert inputs/articles.csv there --format xmc
experiment sweep nosuch inputs/corpus --out x
experiment prune inputs/corpus --out x --save y""".splitlines()
REQUESTS: list[tuple[str, str, Any]] = [
    *(("GET", path, None) for path in ("/health", "/ready", "/info", "/examples", "/openapi.json")),
    *(("GET", path, None) for path in ("/labels?q=ba", "/labels/3", "/clusters/1", "/nosuch")),
    *(("GET", path, None) for path in ("/labels/4000", "/clusters/x", "/predict", "/")),
    ("POST", "/predict", {"inputs": ["TEXT", ""], "top_k": 3}),
    ("POST", "/predict", {"inputs": ["TEXT"], "threshold": "f1"}),
    ("POST", "/predict", {"inputs": ["TEXT"], "threshold": 0.2}),
    ("POST", "/predict", {"inputs": []}),
    ("POST", "/predict", {"inputs": ["TEXT"], "top_k": 0}),
    ("POST", "/predict", {"inputs": ["TEXT"], "nosuch": 1}),
    ("POST", "/predict", b"not json"),
    ("POST", "/predict", {"inputs": ["x"] * 9}),
    ("POST", "/predict", {"inputs": ["x" * 600]}),
    ("POST", "/predict", {"inputs": ["x" * 30_000]}),
    ("POST", "/explain", {"inputs": ["TEXT"], "top_k": 2, "paths": 2}),
    ("POST", "/explain", {"inputs": ["TEXT"], "label": 7}),
    ("POST", "/explain", {"inputs": ["TEXT"], "label": 4000}),
]
API = """
import json, elias
model = elias.Elias.from_pretrained("runs/bag", device="cpu")
corpus = elias.load_corpus("inputs/corpus")
predictions = model.predict(corpus.test.texts, top_k=6)
print(json.dumps([predictions.ids.tolist(), predictions.scores.tolist(),
    predictions.probabilities.tolist(),
    model.threshold("f1"), corpus.fingerprint(), list(model.components), predictions[0].labels,
    model.evaluate(corpus, split="test"), elias.evaluate(predictions, corpus, split="test")]))
"""
ESTIMATOR = """
import json, elias
corpus = elias.load_corpus("inputs/corpus")
names = [[corpus.label_names[i] for i in row.indices] for row in corpus.train.labels]
model = elias.EliasClassifier(device="cpu", random_state=2, dim=16)
model.fit(list(corpus.train.texts), names)
probabilities = model.predict_proba(corpus.test.texts[:9]).toarray()
print(json.dumps([probabilities.tolist(), model.predict_topk(corpus.test.texts[:9], k=3)]))
"""
ONNX_TEXTS = """
import importlib, json, pkgutil, elias
modules = [m.name for m in pkgutil.walk_packages(elias.__path__, "elias.") if "onnx" in m.name]
imported = map(importlib.import_module, ["elias", *modules])
OnnxModel = next(m.OnnxModel for m in imported if hasattr(m, "OnnxModel"))
model = OnnxModel("{0}.onnx", threads=1)
texts = open("inputs/texts.txt", encoding="utf8").read().splitlines()
predictions = model.predict(texts, top_k=5)
print(json.dumps([[r.ids.tolist(), r.scores.tolist(), r.labels] for r in predictions]))
"""
ONNX_IDS = """
import json, numpy as np, onnxruntime
session = onnxruntime.InferenceSession("{0}.onnx")
inputs = {{"ids": np.arange(12).reshape(3, 4), "weights": np.ones((3, 4), "float32")}}
shape = lambda values: [[v.name, v.type, v.shape] for v in values]
print(json.dumps([[v.tolist() for v in session.run(None, inputs)],
    shape(session.get_inputs()), shape(session.get_outputs()),
    sorted(session.get_modelmeta().custom_metadata_map)]))
"""
FINGERPRINT = "from elias import load_corpus\nprint(load_corpus({!r}).fingerprint())"
KEYS = "import json\nfrom elias import EliasConfig\nprint(json.dumps({}.to_dict()))"
IMPORTABLE = """
import importlib, json
def there(path):
    module, _, name = path.rpartition(".")
    try:
        return hasattr(importlib.import_module(module), name)
    except ImportError:
        return False
print(json.dumps({path: there(path) for path in json.load(open("inputs/names.json"))}))
"""


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def answer(url: str, method: str, body: Any) -> tuple[int, str, str]:
    """Return the status, content type and text of an HTTP answer."""
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, reply.headers["content-type"], reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["content-type"], error.read().decode()


def put_text(body: dict[str, Any], text: str) -> dict[str, Any]:
    """Return a request with a real text in the place of TEXT."""
    return body | {"inputs": [text if given == "TEXT" else given for given in body["inputs"]]}


def make_inputs(folder: Path) -> None:
    """Write the corpus, small files of each format, a tiny BERT and the documented names."""
    folder.mkdir(parents=True)
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf8")
    made = ["data", "synthetic", str(folder / "corpus"), "--points", "300", "--labels", "40"]
    subprocess.run([sys.executable, "-m", "elias", *made, "--seed", "3"], check=True)
    lines = (folder / "corpus/raw/tst_X.txt").read_text(encoding="utf8").splitlines()
    (folder / "texts.txt").write_text("\n".join([*lines[:12], "", "no known word\n"]), "utf8")
    words = {w for t in ("trn", "tst") for w in
             (folder / f"corpus/raw/{t}_X.txt").read_text(encoding="utf8").split()}  # fmt: skip
    save_bert(folder / "bert", sorted(words))
    pages = [page.read_text(encoding="utf8") for page in (ROOT / "docs").glob("*.md")]
    names = set(re.findall(r"^::: (elias\.\S+)", "\n".join(pages), re.MULTILINE))
    for module, listed in re.findall(r"^ *from (elias\S*) import (.+)$", "\n".join(pages), re.M):
        names |= {f"{module}.{name.strip()}" for name in listed.split(",") if name.strip("() ")}
    (folder / "names.json").write_text(json.dumps(sorted(names)), encoding="utf8")


def save_bert(folder: Path, words: list[str]) -> None:
    """Write a random BERT of a few thousand weights whose tokenizer knows the given words."""
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: i for i, word in enumerate([*special, *words])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    torch.manual_seed(1)
    config = BertConfig(vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=2,
                        num_attention_heads=2, intermediate_size=32,
                        max_position_embeddings=40)  # fmt: skip
    BertModel(config).save_pretrained(folder)
    named = {f"{name[1:-1].lower()}_token": name for name in special}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)
