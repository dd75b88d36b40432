"""A training step on a GPU, part by part, beside a naive one and the figures of SPEC §8.

PYTHONPATH=src python3 benchmarks/gpu_step.py --out results --quick
"""

import argparse
import gc
import traceback
from functools import partial

import torch
from gpu_setup import (
    DIM,
    SHAPES,
    STAGE,
    Marks,
    Results,
    Rows,
    bert_base,
    gib,
    make_batches,
    make_model,
    median_ms,
    ms,
    ratio,
    stepper,
    table,
)
from naive_step import NaiveStep

from elias.kernels import (
    expand_beam,
    triton_listing,
    triton_loss,
    triton_paths,
    triton_rows,
    triton_search,
)
from elias.kernels.triton_update import LinearState, adamw_edges, adamw_pairs
from elias.kernels.update import AdamWRates, History
from elias.model.elias import SearchSizes
from elias.model.losses import label_loss, shortlist_loss
from elias.training.loop import tensor_cores
from elias.training.optim import Optimizer

RATES = AdamWRates(1e-3, 0.9, 0.999, 1e-8, 0.01)


def free():
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def sizes_of(shape):
    return SearchSizes(shape.train_clusters, shape.shortlist_size)


def step_by_parts(shape, model, optimizer, batches, repeat):
    """Return the median of each part of our step, taken apart as `EliasModel.losses` puts it."""
    marks, sizes = Marks(), sizes_of(shape)
    held = optimizer.gradients
    for i in range(repeat + 3):
        batch = batches[i % len(batches)]
        marks.begin()
        embedding = model.encoder(batch.tokens).float()
        marks("encoder forward")
        leaf = embedding.detach().requires_grad_()
        cluster_log = model.unsaturated_log(leaf)
        beam = model.training_beam(cluster_log, batch.parents, sizes.beam_size)
        found = model.search(
            cluster_log, beam, sizes.shortlist_size, batch.positives, gradients=held
        )
        marks("search")
        loss = label_loss(
            leaf,
            found.log_scores,
            model.labels.weight,
            model.labels.bias,
            found.labels,
            batch.positives,
            held,
        )
        marks("classifier and its gradients")
        loss = loss + 0.05 * shortlist_loss(found.positive_log, found.reached)
        marks("loss")
        loss.backward()
        marks("backward")
        embedding.backward(leaf.grad)
        marks("encoder backward")
        optimizer._parts[1].step(1.0)
        marks("update")
        optimizer._parts[0].step(1.0)
        marks("encoder update")
    return marks.medians()


def our_side(shape, device, given, encoder, compact):
    """Return the times and the peak of our step; ``encoder`` None: all but the encoder."""
    free()
    with_encoder = encoder is not None
    encoder = encoder or Rows(shape.batch, DIM).to(device)
    model = make_model(shape, encoder, device, compact=compact)
    batches = make_batches(shape, model, device)
    free()
    model.train()
    optimizer = Optimizer(model, STAGE)
    answer = {
        "step_ms": median_ms(
            stepper(shape, model, optimizer, batches, captured=given.captured), given.repeat
        )
    }
    answer["peak_gib"] = gib()
    if not given.captured:
        parts = step_by_parts(shape, model, optimizer, batches, given.repeat)
        answer["parts_ms"] = parts
        # in a step that keeps the GPU busy this is free of the host's time
        answer["all_but_encoder_ms"] = sum(
            value for part, value in parts.items() if not part.startswith("encoder")
        )
    if with_encoder:
        answer["compiled"] = encoder._compiled is not None  # it gives up where that fails
    elif not given.no_kernels:
        state = optimizer._index._label_state
        answer["kernels_ms"] = kernel_times(shape, model, batches, given.repeat, state)
    return answer


def kernel_times(shape, model, batches, repeat, label_state):
    """Return the time of each kernel alone, on the data of a step."""
    sizes, device = sizes_of(shape), model.labels.weight.device
    weight, bias, graph = model.labels.weight.detach(), model.labels.bias.detach(), model.graph
    embeddings = [torch.randn(shape.batch, DIM, device=device) for _ in batches]
    cases = []
    with torch.no_grad():
        edge_log = triton_paths.edge_log(
            graph.edge_logits, graph.edge_labels, n_labels=shape.n_labels, beta=shape.beta
        )
        for embedding, batch in zip(embeddings, batches, strict=True):
            cluster_log = model.unsaturated_log(embedding)
            beam = model.training_beam(cluster_log, batch.parents, sizes.beam_size)
            given = (beam, cluster_log.gather(1, beam), graph.edge_labels, edge_log)
            found = expand_beam(
                *given,
                batch.positives,
                n_labels=shape.n_labels,
                shortlist_size=sizes.shortlist_size,
            )
            coefficients = torch.randn(found.labels.shape, device=device) * 1e-3
            pairs = triton_rows.pair_rows(found.labels, coefficients, embedding.to(weight.dtype))
            cases.append((embedding, batch, cluster_log, given, found, coefficients, pairs))
    by_edge = torch.zeros_like(edge_log)
    touched = torch.zeros(shape.n_clusters, dtype=torch.int32, device=device)
    state = LinearState(*label_state)
    edge_state = (
        torch.zeros_like(edge_log),
        torch.zeros_like(edge_log),
        torch.zeros_like(touched),
    )

    def on(function):
        return lambda i: function(*cases[i % len(cases)])

    def expand(**options):
        return on(
            lambda e, b, c, given, *_: triton_search.expand_beam(
                *given, b.positives, shape.n_labels, sizes.shortlist_size, **options
            )
        )

    def list_paths(e, b, c, given, *_):
        n_listed = triton_search.LISTED_A_LABEL * sizes.shortlist_size
        triton_listing.list_paths((*given, b.positives), shape.n_labels, n_listed)

    history = History(device)

    def move_labels(warps):
        def move(*case):
            history.add(RATES)
            adamw_pairs(weight, bias, state, case[-1], history, n_warps=warps)

        return on(move)

    def move_edges(e, b, cluster_log, given, found, g, pairs):
        history.add(RATES)
        touched.scatter_(0, given[0].flatten(), 1)
        adamw_edges(
            graph.edge_logits,
            graph.edge_labels,
            edge_state,
            by_edge,
            touched,
            history,
            n_labels=shape.n_labels,
        )

    works = {
        "cluster scores": on(lambda e, *_: model.unsaturated_log(e)),
        "training beam": on(lambda e, b, c, *_: model.training_beam(c, b.parents, sizes.beam_size)),
        "edge log": on(
            lambda e, b, c, given, *_: triton_paths.edge_log(
                graph.edge_logits,
                graph.edge_labels,
                n_labels=shape.n_labels,
                beta=shape.beta,
                beam=given[0],
            )
        ),
        "expand": expand(),
        "expand, its list of paths": on(list_paths),
        "expand 2048": expand(block=2048, n_warps=16),
        "expand all paths": expand(n_listed=0),
        "path log": on(
            lambda e, b, c, given, found, *_: triton_paths.path_log(
                c, edge_log, given[0], found.paths
            )
        ),
        "path log backward": on(
            lambda e, b, c, given, found, g, p: triton_paths.path_log_backward(
                g, c, edge_log, given[0], found.paths, by_edge, touched
            )
        ),
        "gather dot": on(
            lambda e, b, c, given, found, *_: triton_rows.gather_dot(e, weight, bias, found.labels)
        ),
        "loss": on(
            lambda e, b, c, given, found, g, p: triton_loss.shortlist_bce(
                g, -g.abs(), found.labels, b.positives, shape.n_labels
            )
        ),
        "dot, loss and sum": on(
            lambda e, b, c, given, found, g, p: triton_loss.label_loss(
                e, weight, bias, -g.abs(), found.labels, b.positives
            )
        ),
        "gather sum": on(
            lambda e, b, c, given, found, g, p: triton_rows.gather_sum(g, weight, found.labels)
        ),
        "sort pairs": on(
            lambda e, b, c, given, found, g, p: triton_rows.pair_rows(found.labels, g, e)
        ),
        "adamw labels, 1 warp": move_labels(1),
        "adamw labels, 2 warps": move_labels(2),
        "adamw edges": on(move_edges),
    }
    times = each(works, repeat)
    labels = cases[0][4].labels
    times["touched labels"] = float(labels.unique().numel())
    return times


def each(works, repeat):
    """Return the median time of each, None for one that fails: it must not hide the others."""
    times = {}
    for name, work in works.items():
        try:
            with torch.no_grad():
                times[name] = median_ms(work, repeat)
        except Exception as error:
            times[name] = None
            print(f"# {name}: {type(error).__name__}: {error}", flush=True)
    return times


def naive_side(shape, device, given, encoder):
    """Return the times and the peak of the naive step, with its encoder in fp16 autocast."""
    free()
    with_encoder = encoder is not None
    encoder = encoder or Rows(shape.batch, DIM).to(device)
    encoder.train()
    model = make_model(shape._replace(n_labels=1), encoder, device, compact=False)
    model.graph.edge_labels = torch.randint(
        shape.n_labels, (shape.n_clusters, shape.n_edges), device=device
    )
    naive = NaiveStep(shape, model, DIM, device)
    rough = model.graph.edge_labels.flatten()[: shape.batch * shape.n_positives]
    positives = rough.view(shape.batch, -1).sort(dim=1).values
    whole = make_batches(shape._replace(n_labels=1), model, device)
    parents = torch.randint(shape.n_clusters, positives.shape, device=device)
    batches = [batch._replace(positives=positives, parents=parents) for batch in whole]
    free()
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-5, fused=True)
    marks = Marks()

    def step(i, mark=lambda part: None):
        batch = batches[i % len(batches)]
        with torch.autocast("cuda", torch.float16):
            embedding = encoder(batch.tokens)
        loss = naive.head(embedding.float(), batch)
        mark("forward")
        loss.backward()
        mark("backward")
        naive.update()
        mark("update")
        if with_encoder:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    answer = {"step_ms": median_ms(step, max(5, given.repeat // 2)), "peak_gib": gib()}
    for i in range(8):
        marks.begin()
        step(i, marks)
    answer["parts_ms"] = marks.medians()
    return answer


def encoder_alone(shape, encoder, device, repeat):
    """Return forward and backward of the encoder, in ms."""
    batches = make_batches(
        shape._replace(n_labels=1000, n_clusters=16, n_edges=64),
        make_model(
            shape._replace(n_labels=1000, n_clusters=16, n_edges=64), encoder, device, compact=False
        ),
        device,
    )
    encoder.train()

    def both(i):
        encoder(batches[i % len(batches)].tokens).sum().backward()
        encoder.zero_grad(set_to_none=True)

    return median_ms(both, repeat)


def measure_whole(shape, device, given, keep):
    for compiled in [] if given.no_whole else given.compile:
        suffix = "" if compiled == "off" else f" {compiled}"
        encoder = partial(bert_base, shape.n_tokens, device, compiled)
        if not given.no_encoder:
            keep(
                f"encoder{suffix}",
                lambda e=encoder: {"ms": encoder_alone(shape, e(), device, given.repeat)},
            )
        keep(
            f"whole {given.storage[0]}{suffix}",
            lambda e=encoder: our_side(shape, device, given, e(), given.storage[0] == "compact"),
        )
        torch._dynamo.reset()


def measure(shape, device, given, results):
    def keep(name, work):
        try:
            results(f"{shape.name} {name}", work())
        except Exception as error:
            results(f"{shape.name} {name}", {"error": f"{type(error).__name__}: {error}"})
            traceback.print_exc()
        free()

    for storage in [] if given.no_head else given.storage:
        compact = storage == "compact"
        head_bytes = shape.n_labels * DIM * (4 if compact else 12)
        if head_bytes > 110 * 2**30:
            continue
        keep(f"head {storage}", lambda c=compact: our_side(shape, device, given, None, c))
    measure_whole(shape, device, given, keep)
    if not given.no_naive and shape.n_labels * DIM * 16 < 100 * 2**30:
        keep("naive head", lambda: naive_side(shape, device, given, None))
        if not given.quick:
            encoder = partial(bert_base, shape.n_tokens, device)
            keep("naive whole", lambda: naive_side(shape, device, given, encoder()))


def report(shapes, results):
    rows = []
    for shape in shapes:
        published = {
            "head": shape.head_ms,
            "encoder": shape.encoder_ms,
            "whole": shape.step_ms,
            "naive head": shape.head_ms,
            "naive whole": shape.step_ms,
        }
        for key, entry in results.entries.items():
            if not key.startswith(f"{shape.name} "):
                continue
            name = key.removeprefix(f"{shape.name} ")
            kind = name if name.startswith("naive") else name.split()[0]
            theirs = published[kind]
            ours = entry.get("step_ms", entry.get("ms"))
            naive = results.entries.get(f"{shape.name} naive {name.split()[0]}", {})
            peak = entry.get("peak_gib")
            rows.append(
                (
                    shape.name,
                    name,
                    ms(ours),
                    ms(theirs),
                    ratio(theirs, ours),
                    ratio(naive.get("step_ms"), ours),
                    ms(peak),
                    ratio(shape.peak_gib, peak),
                )
            )
    header = ("shape", "what", "ms", "SPEC ms", "SPEC/it", "naive/it", "peak GiB", "SPEC/peak")
    table("training step", header, rows)
    for shape in shapes:
        entries = {k: v for k, v in results.entries.items() if k.startswith(f"{shape.name} ")}
        for name, entry in entries.items():
            for kind in ("parts_ms", "kernels_ms"):
                parts = entry.get(kind) or {}
                line = ", ".join(f"{part} {ms(value)}" for part, value in parts.items())
                if line:
                    print(f"{name} {kind}: {line}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="benchmarks/results")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--storage", nargs="+", default=None, choices=["full", "compact"])
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, one storage")
    parser.add_argument("--no-naive", action="store_true")
    parser.add_argument(
        "--captured", action="store_true", help="losses and gradients as a CUDA graph"
    )
    parser.add_argument("--no-head", action="store_true")
    parser.add_argument("--no-whole", action="store_true")
    parser.add_argument("--no-kernels", action="store_true", help="no times of single kernels")
    parser.add_argument("--no-encoder", action="store_true", help="no times of the encoder alone")
    parser.add_argument("--name", default="gpu_step", help="of the JSON file")
    parser.add_argument(
        "--compile",
        nargs="+",
        default=["off"],
        choices=["off", "on"],
        help="of the encoder; each but off compiles for a minute or so per shape",
    )
    given = parser.parse_args()
    if given.quick:
        given.repeat = min(given.repeat, 10)
    given.storage = given.storage or (["compact"] if given.quick else ["compact", "full"])
    device = torch.device("cuda")
    results = Results(given.out, given.name)
    shapes = [SHAPES[name] for name in given.shapes]
    with tensor_cores():
        for shape in shapes:
            measure(shape, device, given, results)
    report(shapes, results)


if __name__ == "__main__":
    main()
