"""Read hostile and damaged files: corpora, models, encoders, caches; write where no space is left.

    PYTHONPATH=src:tests python scripts/attack/files.py FOLDER

Each attempt runs in a process of its own. It must end in time, without a signal, with a result or
an error of one line, and may take only so much memory.
"""

import gzip
import json
import math
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

# One thread, so that a process can be forked after everything is compiled. Before torch and numba.
os.environ |= {"NUMBA_THREADING_LAYER": "workqueue", "NUMBA_NUM_THREADS": "1"}
os.environ |= {"OMP_NUM_THREADS": "1"}

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from kills import SETTINGS, damage
from run import Results
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, normalizers

from e2e.commands import elias
from e2e.crash_worker import CORPUS
from elias import Elias, EliasConfig, train
from elias.data import convert, load_corpus, load_label_table
from elias.data.atomic import cache_root
from elias.data.synthetic import synthetic_corpus
from elias.errors import EliasError
from elias.inference.predict import cached_tokens
from elias.labels import LabelTable
from elias.model.transformer import TransformerEncoder
from properties.test_fuzz import KINDS, ODD, damaged, files_of
from saved_models import reseal
from tiny_bert import save_tiny_bert
from unit.data.readers.test_files_hostile import HUGE_CELLS
from unit.data.readers.test_label_table_skos import BOMB

MEBIBYTE = 1 << 20
MOST_MEMORY = 600 * MEBIBYTE
LONGEST = 60.0  # seconds; most attempts take a few milliseconds
TEXT = ["a text of some words"]
rng = random.Random()


def attempt(work):
    """Do something in a process of its own; return (kind, answer, bytes of memory it took)."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        signal.alarm(math.ceil(LONGEST))
        try:
            answer = ("done", work())
        except EliasError as error:
            answer = ("refused", str(error))
        except BaseException:
            answer = ("crashed", traceback.format_exc()[-600:])
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        os.write(writing, pickle.dumps((*answer, 1024 * grown)))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return pickle.loads(answer) if answer else ("crashed", f"ended by signal {-code}", 0)


def until(most, seconds):
    """Yield 0, 1, … up to ``most`` numbers, but stop after some seconds on a busy machine."""
    end = time.monotonic() + seconds
    for number in range(most):
        if time.monotonic() > end:
            return
        yield number


class Attack:
    """Attempts of one kind, for the results."""

    def __init__(self, results, name):
        self.results, self.name = results, name
        self.outcomes, self.failures, self.memory, self.slowest = Counter(), [], 0, 0.0

    def attempt(self, what, work, *, refused=None, same=None):
        """Count an attempt. It fails if it crashes, or is not refused (or done) as it should be."""
        begin = time.monotonic()
        kind, answer, memory = attempt(work)
        self.slowest = max(self.slowest, time.monotonic() - begin)
        self.memory = max(self.memory, memory)
        self.outcomes[kind] += 1
        if (
            kind == "crashed"
            or (refused is not None and refused != (kind == "refused"))
            or (kind == "refused" and ("\n" in answer or len(answer) > 1500))
            or (same is not None and answer != same)
            or memory > MOST_MEMORY
        ):
            self.failures.append(f"{what}: {kind} with {memory / MEBIBYTE:.0f} MB: {answer!r:.500}")

    def end(self, outcome=""):
        """Add a row with the numbers of outcomes, time and memory."""
        kinds = {"refused": "refused in one line", "done": "read as usual", "crashed": "crashed"}
        counted = ", ".join(f"{n} {kinds[kind]}" for kind, n in self.outcomes.most_common())
        cost = f"at most {self.slowest:.1f} s and {self.memory / MEBIBYTE:.0f} MB more"
        tried = sum(self.outcomes.values())
        self.results.add(self.name, tried, f"{outcome or counted}; {cost}", self.failures)


# --- corpora ---


def damaged_corpora(results, folder):
    attack = Attack(results, f"Damaged data files of {len(KINDS)} kinds")
    for number in until(300, 25):
        kind = KINDS[number % len(KINDS)]
        target = folder / "damaged"
        files = files_of(kind)
        wounded = rng.choice(sorted(files))
        for name, content in files.items():
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if name == wounded:
                wounds = [(rng.random(), rng.randrange(9), rng.choice(ODD)) for _ in range(3)]
                content = damaged(content, wounds)
            path.write_bytes(content)
        on_disk = rng.choice(["on", "off"])
        attack.attempt(f"{kind} {wounded}", lambda: len(load_corpus(target, on_disk=on_disk).train))
        shutil.rmtree(target)
    attack.end()


def bombs(results, folder):
    attack = Attack(
        results, f"Decompression bombs: Parquet of {len(HUGE_CELLS)} column types, gzip"
    )
    for kind, cells in HUGE_CELLS.items():
        path = folder / "bomb.parquet"
        table = pa.table({"text": cells(), "labels": pa.array(["fish"] * len(cells()))})
        pq.write_table(table, path, compression="zstd", dictionary_pagesize_limit=1 << 30)
        attack.attempt(f"Parquet of {kind}", lambda: len(load_corpus(path).train), refused=True)
    lines = (b"a,b\n", b"cod wine,fish;x\n", b"x" * 1000, b'{"text": "a", "labels": ["b"]}\n')
    for line in lines:
        path = folder / "bomb.gz"
        with gzip.open(path, "wb", 6) as out:
            out.write(b"" if line.startswith(b"{") else b"text,labels\n")
            for _ in range(100):
                out.write(line * (MEBIBYTE // len(line)))
        attack.attempt(f"gzip of {line[:20]!r}", lambda: len(load_corpus(path).train), refused=True)
    attack.end()


def pipes(results, folder):
    attack = Attack(results, "Pipes and devices in place of data files")
    names = ["trn_X.txt", "raw/trn_X.txt", "Y.txt", "labels.txt", "train.jsonl", "train.csv"]
    for name in names:
        for device in (None, "/dev/zero"):
            target = folder / "pipes"
            (target / "raw").mkdir(parents=True)
            if name == "labels.txt":
                rows = '{"text": "cod", "labels": ["fish"]}\n' * 9
                (target / "train.jsonl").write_text(rows)
            os.mkfifo(target / name) if device is None else (target / name).symlink_to(device)
            attack.attempt(
                f"{name} is {device}", lambda: len(load_corpus(target).train), refused=True
            )
            attack.attempt(
                f"{name} is {device}", lambda: len(load_corpus(target / name).train), refused=True
            )
            shutil.rmtree(target)
    attack.end()


def hostile_vocabularies(results, folder):
    attack = Attack(
        results, "Hostile vocabularies: contexts elsewhere, entities, nesting, long literals"
    )
    address, start = "http://localhost:9/context", "@prefix skos: <http://skos/> . <http://a> a "
    contents = {
        "a.jsonld": [
            json.dumps({"@context": address}),
            json.dumps({"@context": [[[address]]]}),
            json.dumps({"@context": {"a": {"@id": "http://a", "@context": address}}}),
            json.dumps({"@context": {"@import": "file:///etc/hosts"}}),
            "[" * 100_000,
        ],
        "a.rdf": [
            BOMB.format("", "&e9;"),
            BOMB.format("", "a\n" * 500_000),
            BOMB.format(' rdf:parseType="Literal"', "<b>a</b>" * 100_000),
            BOMB.format("", "<Concept><broader>" * 2000),
            BOMB.replace("<!ENTITY e0", '<!ENTITY x SYSTEM "/dev/zero"><!ENTITY e0').format(
                "", "&x;"
            ),
        ],
        "a.ttl": [f"{start}[{'[' * 100_000}", f"{start}({'(' * 100_000}", "\0" * 1000],
        "a.n3": ["{" * 100_000],
    }
    for name, texts in contents.items():
        for text in texts:
            path = folder / name
            path.write_text(text, encoding="utf8")
            refused = "/dev/zero" not in text  # an external entity is left out
            attack.attempt(
                f"{name} {text:.60}", lambda: len(load_label_table(path)), refused=refused
            )
    attack.end()


# --- models ---


def load_and_predict(folder):
    model = Elias.from_pretrained(str(folder), device="cpu")
    predictions = model.predict(TEXT, top_k=5)
    if not np.isfinite(predictions.scores).all():
        raise ValueError("a score is not finite")
    return len(predictions)


def model_files(model):
    return [p for p in sorted(model.rglob("*")) if p.is_file() and p.name != "README.md"]


def flipped_models(results, folder, model, compact):
    attack = Attack(results, "Saved model with flipped bits or bytes, cut or missing files")
    copy = folder / "copy"
    for _ in until(100, 20):
        shutil.copytree(rng.choice([model, compact]), copy)
        how = damage(rng.choice(model_files(copy)), rng)
        attack.attempt(how, lambda: load_and_predict(copy), refused=True)
        shutil.rmtree(copy)
    for path in model_files(model):
        for kind in ("pipe", "device", "folder"):
            shutil.copytree(model, copy)
            target = copy / path.relative_to(model)
            target.unlink()
            if kind == "pipe":
                os.mkfifo(target)
            elif kind == "device":
                target.symlink_to("/dev/zero")
            else:
                target.mkdir()
            attack.attempt(f"{kind} as {path.name}", lambda: load_and_predict(copy), refused=True)
            shutil.rmtree(copy)
    attack.end()


ODD_VALUES = [-1, 0, 1, 10**9, 10**30, 1e308, 0.5, "", "x", "../..", None, True, [], {}, [[]] * 9]


def change_leaf(tree):
    """Replace a random value somewhere in a tree of JSON."""
    keys = list(tree) if isinstance(tree, dict) else range(len(tree))
    key = rng.choice(list(keys))
    if isinstance(tree[key], dict | list) and tree[key] and rng.random() < 0.9:
        return f"{key}.{change_leaf(tree[key])}"
    tree[key] = rng.choice(ODD_VALUES)
    return f"{key} = {tree[key]!r:.40}"


def forged_models(results, folder, model, compact):
    attack = Attack(results, "Saved model changed, with checksums that fit")
    copy = folder / "copy"
    for number in until(200, 25):
        shutil.copytree(rng.choice([model, compact]), copy)
        tensors = [p for p in model_files(copy) if p.suffix == ".safetensors"]
        if number % 10 == 0:
            path = copy / "labels.tsv"
            lines = path.read_text(encoding="utf8").split("\n")
            row = rng.randrange(len(lines))
            lines[row] = rng.choice(
                ["", "\t", "a\\ud800\t\t", '\t\t["a", 1]', "[" * 9999, lines[0]]
            )
            path.write_text("\n".join(lines), encoding="utf8")
            how = f"{path.name}:{row + 1}: {lines[row]!r:.40}"
        elif number % 2:
            path = copy / "config.json"
            tree = json.loads(path.read_text())
            files = tree.pop("files")
            how = change_leaf(tree)
            path.write_text(json.dumps({**tree, "files": files}))
        else:
            path = rng.choice(tensors)
            raw = bytearray(path.read_bytes())
            # in the header or in the numbers
            begin = rng.randrange(900 if number % 4 else len(raw) - 8)
            raw[begin : begin + 4] = rng.choice(
                [b"\xff\xff\xff\x7f", b"\0\0\0\0", rng.randbytes(4)]
            )
            path.write_bytes(raw)
            how = f"{path.name} at {begin}"
        for sealed in [*(copy / "members").glob("*"), copy]:
            reseal(sealed)
        attack.attempt(how, lambda: load_and_predict(copy))
        shutil.rmtree(copy)
    attack.end()


def hostile_encoders(results, folder):
    attack = Attack(
        results, "Hostile pretrained encoders: pickles, code, remote kernels, tokenizers"
    )
    tiny, copy, witness = Path(save_tiny_bert(folder / "bert")), folder / "copy", folder / "was-run"

    def changed_config(**changes):
        path = copy / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    def as_pickle():
        torch.save(load_file(copy / "model.safetensors"), copy / "pytorch_model.bin")
        (copy / "model.safetensors").unlink()

    def with_code():
        code = f"open({str(witness)!r}, 'w')\nclass Config: pass\nclass Model: pass\n"
        (copy / "evil.py").write_text(code)
        auto = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}
        changed_config(auto_map=auto, model_type="evil")

    def with_normalizer(normalizer):
        tokenizer = Tokenizer.from_file(str(copy / "tokenizer.json"))
        tokenizer.normalizer = normalizer
        tokenizer.save(str(copy / "tokenizer.json"))

    kernel, flash = "kernels-community/flash-attn", "flash_attention_2"
    cases = {
        "weights in a pickle": as_pickle,
        "code": with_code,
        "a kernel": lambda: changed_config(attn_implementation=kernel),
        "a kernel of its own": lambda: changed_config(_attn_implementation=f"{kernel}@main:run"),
        "flash attention": lambda: changed_config(attn_implementation=flash),
        "a million layers": lambda: changed_config(num_hidden_layers=10**6),
        "a wide model": lambda: changed_config(hidden_size=10**9),
        "a pipe": lambda: os.mkfifo(copy / "vocab.txt"),
        "a growing text": lambda: with_normalizer(
            normalizers.Sequence([normalizers.Replace("a", "a" * 10)] * 50)
        ),
        "a regular expression": lambda: with_normalizer(
            normalizers.Sequence([normalizers.Replace(Regex("x*"), "aa")] * 30)
        ),
        "no tokenizer": lambda: (copy / "tokenizer.json").write_text("[" * 10**6),
        "broken weights": lambda: (copy / "model.safetensors").write_bytes(b"\xff" * 100),
    }
    config = EliasConfig().override({"encoder.model": str(copy), "encoder.max_length": 16}).encoder
    for name, prepare in cases.items():
        shutil.copytree(tiny, copy)
        prepare()
        attack.attempt(name, lambda: TransformerEncoder.from_config(config), refused=True)
        shutil.rmtree(copy)
    if witness.exists():
        attack.failures.append("the code of a model was run")
    attack.end()


# --- caches, disks, numbers, names ---


def damaged_caches(results, folder, model, rows):
    attack = Attack(results, "Damaged caches of tokens and corpora")
    encoder = Elias.from_pretrained(str(model), device="cpu").model.encoder

    def read():
        corpus = load_corpus(rows, on_disk="on")
        tokens = cached_tokens(corpus.train, encoder)
        parts = (tokens.offsets, tokens.ids, tokens.weights)
        return corpus.fingerprint(), [np.asarray(part).tobytes() for part in parts]

    shutil.rmtree(cache_root())
    same = read()
    for _ in until(60, 15):
        how = damage(rng.choice([p for p in cache_root().rglob("*") if p.is_file()]), rng)
        attack.attempt(how, read, refused=False, same=same)
    attack.end("noticed, and computed again")


def full_disks(results, folder, model, rows):
    attack = Attack(results, "Full disk while a model, predictions or a corpus is written")
    whole = Elias.from_pretrained(str(model), device="cpu")
    actions = {
        "save": lambda out: whole.save_pretrained(out),
        "predict": lambda out: elias("predict", model, rows, "--out", out.with_suffix(".jsonl")),
        "convert": lambda out: convert(load_corpus(rows), out, "folder"),
        "train": lambda out: elias("-q", "train", rows, "--out", out, "--set", "encoder.dim=8"),
    }

    def write(name, limit):
        out = folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        done = actions[name](out)
        if getattr(done, "code", 0) not in (0, 2):
            raise ValueError(f"exit code {done.code}: {done.err}")

    for number in until(24, 20):
        name = list(actions)[number % len(actions)]
        limit = int(2 ** rng.uniform(6, 17))
        attack.attempt(f"{name} with {limit} bytes", lambda: write(name, limit))
        out = folder / "out"
        if (out / "model.safetensors").exists() or (out / "model").exists():
            attack.attempt("what was saved", lambda: load_and_predict(out), refused=False)
    attack.end("stopped in one line, and nothing is left that looks whole, or finished")


def diverging_runs(results, folder):
    attack = Attack(results, "Learning rates of 10³ to 10³⁰, extreme α, β and costs")
    keys = [f"stages.{s}.{k}_lr" for s in ("stage1", "stage2") for k in ("bag", "cluster", "label")]
    cases = [{key: 10.0**power} for key in keys for power in (3, 8, 20, 30)]
    cases += [{"index.alpha": 1e38}, {"index.beta": 1e38}, {"rerank.cost": 1e30}]

    def run(case):
        out = folder / "diverged"
        shutil.rmtree(out, ignore_errors=True)
        config = EliasConfig().override(SETTINGS | {"ensemble.members": 1} | case)
        train(synthetic_corpus(**CORPUS), config, out=out, device="cpu")
        return load_and_predict(out)

    rng.shuffle(cases)
    for number in until(len(cases), 20):
        case = cases[number]
        attack.attempt(str(case), lambda: run(case))
    n_stopped, n_done = attack.outcomes["refused"], attack.outcomes["done"]
    attack.end(f"{n_stopped} stopped with the learning rate to lower, {n_done} models that load")


def escape_sequences(results, folder):
    attack = Attack(results, "Escape sequences in label names and texts, on the command line")
    evil = "cod \x1b]0;owned\x07\x1b[2J\x9b31m\x7f"
    rows = folder / "evil.jsonl"
    lines = [
        json.dumps({"text": f"{evil} {i % 7}", "labels": [f"{evil} {i % 5}"]}) for i in range(60)
    ]
    rows.write_text("\n".join(lines))
    run = folder / "evil"
    train(load_corpus(rows), EliasConfig().override({"encoder.dim": 8}), out=run, device="cpu")
    commands = [
        ("info", run),
        ("info", run, "--json"),
        ("data", "info", rows),
        ("data", "info", rows, "--json"),
        ("predict", run, rows, "--table"),
        ("predict", run, rows, "--json"),
        ("explain", run, evil),
        ("explain", run, evil, "--json"),
        ("evaluate", run, rows, "--per-label", folder / "labels.csv"),
        ("predict", run, rows, "--only", evil),
    ]

    def said(command):
        output = elias(*command)
        text = output.out + output.err
        raw = {c for c in text if ord(c) < 32 or 127 <= ord(c) < 160} - {"\n", "\t"}
        return (output.code in (0, 2), raw)

    for command in commands:
        same = (True, set())
        attack.attempt(f"{command[:2]}", lambda: said(command), refused=False, same=same)
    attack.end("none reached the terminal")


def main():
    folder = Path(sys.argv[1])
    results = Results(folder)
    corpus = synthetic_corpus(**CORPUS)
    rows = folder / "rows.jsonl"
    convert(corpus, rows, "jsonl")
    train(corpus, EliasConfig().override(SETTINGS), out=folder / "run", device="cpu")
    model = folder / "run" / "model"
    load_and_predict(model)
    compact = folder / "compact"  # with added labels, and details of them
    table = LabelTable(("cod", "sea"), ids=("1", "2"), synonyms=(("fish",), ()))
    Elias.from_pretrained(model, device="cpu").add_labels(table).save_pretrained(
        compact, compact=True
    )
    load_and_predict(compact)
    damaged_corpora(results, folder)
    bombs(results, folder)
    pipes(results, folder)
    hostile_vocabularies(results, folder)
    flipped_models(results, folder, model, compact)
    forged_models(results, folder, model, compact)
    hostile_encoders(results, folder)
    damaged_caches(results, folder, model, rows)
    full_disks(results, folder, model, rows)
    diverging_runs(results, folder)
    escape_sequences(results, folder)


if __name__ == "__main__":
    main()
