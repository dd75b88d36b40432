"""Train in several processes, forked from one with all imports done, and record the results.

    python train_worker.py FOLDER

`tests/e2e/test_processes.py` reads the results from ``FOLDER/results.json``. Every process is
forked from one that has loaded the compiled kernels. Started by torchrun, it is one of the
processes of a run that is killed once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from functools import partial
from pathlib import Path

# Before numba is imported: of its thread pools this one survives a fork.
os.environ["NUMBA_THREADING_LAYER"] = "workqueue"
os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from scipy.sparse import csr_matrix
from transformers import BertConfig

from e2e.commands import SMALL, elias, free_port
from e2e.crash_worker import CONFIG, CORPUS, call_before
from elias import EliasConfig, train
from elias.config import EncoderConfig, IndexConfig
from elias.data.synthetic import synthetic_corpus, write_synthetic
from elias.distributed import joined
from elias.distributed import world as processes
from elias.distributed.data_parallel import sum_touched
from elias.distributed.sharded_linear import ShardedRows
from elias.errors import DataError, EliasError, Interrupted
from elias.kernels import IndexGradients, label_logits
from elias.model.elias import EliasModel, LinearRows
from elias.model.graph import LabelGraph
from elias.model.transformer import TransformerEncoder
from elias.text import tokens
from elias.training import optimizer, sharded_step
from elias.training.stage import Points, StageLoop
from elias.training.train import train_together
from stages import make_stage
from tiny_bert import SIZES, corpus_of_long_texts, save_tiny_model, windows_config

STEP = "elias.training.optimizer:Optimizer.step"
NO_DROPOUT = {"encoder.dropout": 0.0, "encoder.token_dropout": 0.0, "rerank.enabled": False}
BASE = EliasConfig().override(CONFIG | NO_DROPOUT | {"checkpoint.minutes": 10.0})
RANKED = BASE.override(
    {"rerank.enabled": True, "stages.stage1.epochs": 1, "stages.stage2.epochs": 1}
)
DROPPING = BASE.override(
    {"encoder.dropout": 0.3, "encoder.token_dropout": 0.3, "stages.stage1.batch_size": 3}
).override({"stages.stage1.epochs": 1, "stages.stage2.epochs": 1})
ALL = EliasConfig().override(
    {key: value for key, value in CONFIG.items() if not key.startswith("stages")}
    | NO_DROPOUT
    | {"index.kind": "all", "stages.one-vs-all.epochs": 2, "stages.one-vs-all.batch_size": 64}
    | {"stages.one-vs-all.label_share": 0.5}
)
N_LABELS = 41  # no multiple of the processes


def corpus(n_points=CORPUS["n_points"]):
    return synthetic_corpus(**{**CORPUS, "n_points": n_points, "n_labels": N_LABELS})


def spawn(size, work, stopped=None):
    """Do ``work(rank)`` in processes that meet; return what each said, or what ended it.

    One that is ``stopped`` is ended when the others are done.
    """
    port, readers, ids = free_port(), [], []
    for rank in range(size):
        reader, writer = os.pipe()
        ids.append(os.fork())
        if ids[-1] == 0:
            os.close(reader)
            result = {"failed": "?"}
            try:
                torch.set_num_threads(1)
                os.environ.update(
                    RANK=str(rank),
                    WORLD_SIZE=str(size),
                    MASTER_ADDR="127.0.0.1",
                    MASTER_PORT=str(port),
                )
                result = work(rank)
            except (EliasError, Interrupted) as error:
                result = {"failed": str(error)}
            except BaseException:
                result = {"failed": traceback.format_exc()}
            finally:
                os.write(writer, json.dumps(result).encode())
                os._exit(0)
        os.close(writer)
        readers.append(os.fdopen(reader, "rb"))
    message = [b"" if rank == stopped else readers[rank].read() for rank in range(size)]
    if stopped is not None:
        os.kill(ids[stopped], signal.SIGKILL)
    codes = [os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) for number in ids]
    results = zip(message, codes, strict=True)
    return [json.loads(text) if text else {"killed": code} for text, code in results]


def stopping_at(step):
    """Send SIGTERM to this process in a step."""
    if step is not None:
        call_before(f"{STEP}:{step}", lambda: os.kill(os.getpid(), signal.SIGTERM))


def alone(config, out, step=None):
    def work(_):
        stopping_at(step)
        train(corpus(), config, out=out, device="cpu")
        return {}

    return spawn(1, work)


def together(size, config, out, step=None, of=0, points=None):
    """Train in ``size`` processes; one of them, if any, gets a SIGTERM in a step."""
    points = points or corpus()

    def work(rank):
        if rank == of:
            stopping_at(step)
        with joined("cpu") as world:
            train_together(world, config, points, out=out)
            return {"received": dict(world.received)}

    return spawn(size, work)


def checked_scores(world, n_labels):
    """Return how far scores and gradients of sharded rows are from those of whole rows."""
    torch.manual_seed(7)
    whole = LinearRows(n_labels, 8)
    rows = ShardedRows.of(world, whole)
    n_points, share = 5, world.share(5)
    points = torch.randn(n_points, 8)
    labels = torch.stack([torch.randperm(n_labels + 2)[:3] for _ in range(n_points)])
    labels = labels.clamp(max=n_labels)  # some of them padding
    by_score = torch.randn(n_points, 3)

    own = points[share].clone().requires_grad_()
    rows.n_points = n_points
    scores = rows.logits(own, labels[share])
    (scores * by_score[share]).sum().backward()
    every = points.clone().requires_grad_()
    wanted = label_logits(every, whole.weight, whole.bias, labels)
    (wanted * by_score).sum().backward()

    gradient = whole.weight.grad.to_dense()[world.rank :: world.size]
    results = rows.weight.grad
    results = torch.zeros_like(gradient) if results is None else results.to_dense()
    pairs = [(scores, wanted[share]), (own.grad, every.grad[share]), (results, gradient)]
    gathered = rows.gathered()
    same = gathered is None or torch.equal(gathered.weight, whole.weight)
    return same, [float((a - b).detach().abs().max()) if a.numel() else 0.0 for a, b in pairs]


def checked_pairs(world):
    """Return how far pairs for the Triton update are from the gradient of whole rows."""
    torch.manual_seed(7)
    whole, points = LinearRows(11, 8), torch.randn(5, 8)
    rows, share = ShardedRows.of(world, whole), world.share(5)
    labels = torch.stack([torch.randperm(12)[:3] for _ in range(5)])
    gradients = IndexGradients(None)

    rows.n_points = 5
    own = points[share].clone().requires_grad_()
    rows.logits(own, labels[share], gradients).sum().backward()
    every = points.clone().requires_grad_()
    label_logits(every, whole.weight, whole.bias, labels).sum().backward()

    results = torch.zeros(len(rows.weight) + 1, 8)
    ids, coefficients, embedding = gradients.take_pairs()
    by_pair = coefficients.unsqueeze(2) * embedding.unsqueeze(1)
    results.index_add_(0, ids.reshape(-1), by_pair.reshape(-1, 8))
    wanted = whole.weight.grad.to_dense()[world.rank :: world.size]
    by_point = (own.grad - every.grad[share]).abs().max() if len(own) else torch.zeros(())
    return rows.weight.grad is None, [float((results[:-1] - wanted).abs().max()), float(by_point)]


def checked_sums(world):
    """Return whether sums of few and of many touched rows equal the sum of whole gradients."""
    results = []
    for n_rows in (30, 700):
        torch.manual_seed(n_rows)
        parts = torch.zeros(world.size, 1000, 5000)
        for part in parts:
            part[torch.randperm(1000)[: n_rows // world.size]] = 1.0
        gradient = parts[world.rank].clone()
        sum_touched(world, gradient)
        results.append(bool(torch.equal(gradient, parts.sum(dim=0))))
    return results, world.received["gradients of shared parameters"]


def scores_of_shared_rows(size):
    def work(_):
        with joined("cpu") as world:
            results = {n_labels: checked_scores(world, n_labels) for n_labels in (11, 3)}
            results["pairs"] = checked_pairs(world)
            sums = checked_sums(world)
            array = np.arange(6, dtype=np.int32).reshape(2, 3) if world.is_rank0 else None
            result = world.broadcast(array)
        return {"scores": results, "sums": sums, "broadcast": [str(result.dtype), result.tolist()]}

    return spawn(size, work)


def killed(rank, folder):
    """Train; process 1 is killed in a step of stage 2."""
    if rank == 1:
        call_before(f"{STEP}:13", lambda: os.kill(os.getpid(), signal.SIGKILL))
    with joined("cpu") as world:
        train_together(world, BASE.override({"checkpoint.minutes": 1e-9}), corpus(), out=folder)
    return {}


def hanging(rank, folder):
    """Train; process 1 hangs in a step."""
    if rank == 1:
        call_before(f"{STEP}:3", lambda: os.kill(os.getpid(), signal.SIGSTOP))
    with joined("cpu", timeout=3) as world:
        train_together(world, BASE, corpus(), out=folder)
    return {}


def asleep(rank):
    """Be in something that does not end, while the other process is killed."""
    processes.GRACE_SECONDS = 0.5
    with joined("cpu") as world:
        world.broadcast(None)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    return {}


def different(rank, folder):
    """Give each process a folder of its own."""
    with joined("cpu") as world:
        train_together(world, BASE, corpus(), out=folder / str(rank))
    return {}


def reading(rank):
    """Read something else than the first process."""
    processes.GRACE_SECONDS = 0.5
    with joined("cpu") as world:
        world.check_same({"corpus": f"of {rank}"})
        time.sleep(60)
    return {}


def commanded(folder, data, *more):
    """Run `elias train` as torchrun would."""
    options = ("--set", "rerank.enabled=false", "--set", "stages.stage2.epochs=1", *more)
    result = elias("train", data, "--out", folder, *SMALL, *options)
    return {"code": result.code, "out": result.out, "err": result.err}


def evaluated(run, data):
    """Run `elias evaluate` as torchrun would."""
    return {"out": elias("evaluate", run, data, "--json", "--device", "cpu").out}


def on_two_machines(rank, folder, n_first=2):
    """Pretend that the first processes are on one machine and the others on another."""
    machine = int(rank >= n_first)
    os.environ["LOCAL_RANK"] = str(rank - n_first * machine)
    os.environ["XDG_CACHE_HOME"] = str(folder / f"cache of {machine}")


def preparing(rank, folder, sleeps=0.0, dies=None):
    """Train on two machines; count the splits whose tokens this process has written."""
    on_two_machines(rank, folder)
    written = []
    real = tokens._store

    def noted(*args):
        if rank == dies:
            os.kill(os.getpid(), signal.SIGKILL)
        written.append(1)
        if rank == 2 and len(written) == 1:
            time.sleep(sleeps)
        real(*args)

    tokens._store = noted
    with joined("cpu", timeout=1.0 if sleeps else 600.0) as world:
        train_together(world, BASE, corpus(), out=folder / "run")
    return {"written": len(written)}


def ranking(rank, folder, then):
    """Train on two machines, where ``then`` happens to the last process in the ranker."""
    on_two_machines(rank, folder)
    processes.GRACE_SECONDS = 0.2
    result = folder / f"process {rank}"
    result.parent.mkdir(exist_ok=True)
    result.write_text(str(os.getpid()))

    def begin():
        ended = folder / "ended 1"
        while not ended.exists():  # its help is done, and it does not wait
            time.sleep(0.02)
        then(int((folder / "process 2").read_text()))

    if rank == 0:
        call_before("elias.rerank.reranker:Reranker.fit:1", begin)
    with joined("cpu") as world:
        train_together(world, RANKED, corpus(), out=folder / "run")
    (folder / f"ended {rank}").touch()
    return {"saved": (folder / "run" / "model").is_dir()}


def kill(waiting):
    """Kill the process that stays, and give time to notice."""
    os.kill(waiting, signal.SIGKILL)
    time.sleep(1.0)


def fail(_):
    raise DataError("the ranker has failed")


class Rerun:
    """Stand-in for a recorder of CUDA graphs: a replay runs the function again."""

    def __init__(self, fails=False):
        self.fails, self.n_replays = fails, 0

    def record_all(self, functions):
        results = [function() for function in functions]
        if self.fails:
            raise RuntimeError("no graphs on this driver")
        pairs = zip(functions, results, strict=True)
        return [(partial(self.replay, *pair), pair[1]) for pair in pairs]

    def replay(self, function, result):
        self.n_replays += 1
        again = function()
        if result is not None:
            result.copy_(again)


def stage_losses(model, recorder):
    """Train a stage as on a GPU; return its losses, the encoder and the number of replays."""
    optimizer.runs_triton = lambda _: True
    sharded_step.GraphRecorder = lambda _: recorder
    model.encoder.packs = lambda _: True
    model.encoder.capturable = recorder is not None
    rng, losses = np.random.default_rng(0), []
    words = np.array(["red", "cod", "tape", "sea", "quota"])
    texts = [" ".join(rng.choice(words, rng.integers(1, 9))) for _ in range(22)]
    labels = csr_matrix(rng.random((len(texts), model.n_labels)) < 0.25)
    stage = make_stage(epochs=2, batch_size=5, learn_graph=True, index_every=2, label_eps=1e-4)
    sizes = {"n_clusters": 4, "edges_per_cluster": 5, "train_shortlist": 6, "beta": 2.0}
    config = EliasConfig(index=IndexConfig(**sizes), stages=(stage,))
    with joined("cpu") as world:
        model.labels = ShardedRows.of(world, model.labels)
        StageLoop(
            model=model,
            stage=stage,
            config=config.resolve(len(texts), model.n_labels),
            points=Points(model.encoder.tokenize(texts), labels),
            rng=np.random.default_rng(1),
            validate=None,
            report=lambda report: losses.append(report.loss),
            world=world,
        ).run()
    weights = model.encoder.named_parameters()
    weights = [p.detach().flatten() for name, p in weights if not name.endswith("key.bias")]
    return {
        "losses": losses,
        "encoder": torch.cat(weights).tolist(),
        "replays": 0 if recorder is None else recorder.n_replays,
    }


def captured_stages(bert):
    """Train the same stage eagerly, captured, and with captures that fail on rank 0."""
    torch.manual_seed(2)
    edges = torch.stack([torch.randperm(8)[:5] for _ in range(4)])
    graph = LabelGraph(edges, 8, 2.0, edge_logits=torch.randn(4, 5))
    encoder = TransformerEncoder.from_config(EncoderConfig(model=bert, max_length=12, dropout=0.2))
    model = EliasModel(encoder, graph, alpha=1.5)
    recorders = {
        "one, eager": (1, lambda _: None),
        "eager": (2, lambda _: None),
        "captured": (2, lambda _: Rerun()),
        "half captured": (2, lambda rank: Rerun(fails=rank == 0)),
    }
    return {
        name: spawn(size, lambda rank, make=make: stage_losses(model, make(rank)))
        for name, (size, make) in recorders.items()
    }


def launched(folder):
    """Be one of the processes that torchrun started: one is killed the first time."""
    torch.set_num_threads(1)
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    killed(int(os.environ["RANK"]) if first else 0, folder)


def main(folder):
    torch.set_num_threads(1)
    train(corpus(), BASE, out=folder / "plain", device="cpu")  # and all kernels are loaded
    results = {"scores": scores_of_shared_rows(4)}
    results["several"] = {
        size: together(size, BASE, folder / f"several-{size}") for size in (1, 2, 4)
    }
    results["dropping"] = {
        size: together(size, DROPPING, folder / f"dropping-{size}", points=corpus(120))
        for size in (1, 4)
    }
    results["all"] = [alone(ALL, folder / "all-plain"), together(2, ALL, folder / "all-2")]
    dropping = BertConfig(**SIZES, hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2)
    bert = save_tiny_model(folder / "bert", dropping)
    results["captured"] = captured_stages(bert)
    windows = windows_config(bert)
    # AdamW enlarges the rounding of key biases, whose gradient is 0, up to the learning rate
    windows |= {"stages.one-vs-all.epochs": 1, "stages.one-vs-all.encoder_lr": 1e-5}
    windows = EliasConfig().override(windows)
    for size in (1, 3):
        long_texts = corpus_of_long_texts(40)
        results[f"windows-{size}"] = together(
            size, windows, folder / f"windows-{size}", points=long_texts
        )
    chain = folder / "chain"
    results["chain"] = [
        alone(BASE, chain, 12),  # a gradient waits there
        together(2, BASE, chain, 1, of=1),
        together(4, BASE, chain, 2),
        alone(BASE, chain),
    ]
    lost = folder / "lost"
    results["lost"] = [spawn(3, lambda rank: killed(rank, lost)), together(2, BASE, lost)]
    results["hanging"] = spawn(3, lambda rank: hanging(rank, folder / "hanging"), stopped=1)
    results["asleep"] = spawn(2, asleep)
    results["different"] = spawn(2, lambda rank: different(rank, folder / "different"))
    results["reading"] = spawn(2, reading)
    results["machines"] = spawn(4, lambda rank: preparing(rank, folder / "machines", sleeps=2.0))
    results["machine lost"] = spawn(4, lambda rank: preparing(rank, folder / "less", dies=2))
    train(corpus(), RANKED, out=folder / "ranked", device="cpu")
    after = {"left alone": lambda _: None, "killed": kill, "failing": fail}
    results["ranking"] = {
        name: spawn(3, lambda rank, name=name, then=then: ranking(rank, folder / name, then))
        for name, then in after.items()
    }
    write_synthetic(folder / "corpus", n_points=120, n_labels=20)
    results["commands"] = [
        spawn(2, lambda _, data=data: commanded(folder / f"trained on {data}", folder / data))
        for data in ("corpus", "nothing")
    ]
    run, data = folder / "trained on corpus", folder / "corpus"
    steep = "--set=stages.stage1.bag_lr=1e20"
    results["diverged"] = spawn(2, lambda _: commanded(folder / "diverged", data, steep))
    results["evaluate"] = [evaluated(run, data), *spawn(2, lambda _: evaluated(run, data))]
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    if "TORCHELASTIC_RESTART_COUNT" in os.environ:
        launched(Path(sys.argv[1]) / "run")
    else:
        main(Path(sys.argv[1]))
