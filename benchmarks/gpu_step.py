"""Measure the parts of a training step on a GPU, and of a naive step for comparison.

PYTHONPATH=src python3 benchmarks/gpu_step.py --out results --quick

SPEC §8 has the figures of the published program. Both steps have the same graph, weights, clusters
and batches, made from one seed.
"""

import argparse
from functools import partial

import torch
from gpu_setup import (
    DIM,
    KNOWN,
    SHAPES,
    STAGE,
    Marks,
    Results,
    Rows,
    fingerprint,
    free,
    gib,
    make_problem,
    median_ms,
    ms,
    ratio,
    stepper,
    table,
    text_encoder,
)
from naive_step import NaiveStep, naive_stepper

from elias.kernels import runs_triton
from elias.model.elias import SearchSizes
from elias.model.losses import classification_loss, shortlist_loss
from elias.training.optimizer import Optimizer
from elias.training.stage import tensor_cores

PARTS = {
    "encoder": ("encoder forward",),
    "search": ("search",),
    "classifier": ("classifier", "classifier and its gradients"),
    "loss": ("loss",),
    "backward": ("backward", "encoder backward"),
    "update": ("update", "encoder update"),
}
"""The six parts of a step; each is the sum of its timed sections."""


def step_by_parts(shape, model, optimizer, batches, repeat):
    """Return the median time of each part of our step, split as in `EliasModel.losses`."""
    marks, sizes = Marks(), SearchSizes(shape.train_clusters, shape.shortlist_size)
    held = optimizer.gradients
    for i in range(repeat + 3):
        batch = batches[i % len(batches)]
        marks.begin()
        embedding = model.encoder(batch.tokens).float()
        marks("encoder forward")
        leaf = embedding.detach().requires_grad_()
        cluster_log = model.unsaturated_log(leaf)
        beam = model.training_beam(cluster_log, batch.parents, sizes.beam_size)
        paths = model.search(
            cluster_log, beam, sizes.shortlist_size, batch.positives, gradients=held
        )
        marks("search")
        loss = classified(model, leaf, paths, batch.positives, held)
        marks("classifier and its gradients")
        loss = loss + 0.05 * shortlist_loss(paths.positive_log, paths.reached)
        marks("loss")
        loss.backward()
        marks("backward")
        embedding.backward(leaf.grad)
        marks("encoder backward")
        optimizer.index_group.step(1.0)
        marks("update")
        optimizer.encoder_group.step(1.0)
        marks("encoder update")
    return marks.medians()


def classified(model, embedding, paths, positives, held):
    """Return the loss of the classifier, fused if ``held`` takes the gradients."""
    return classification_loss(
        model.labels, embedding, paths.log_scores, paths.labels, positives, model.n_labels, held
    )


def our_side(shape, device, given, encoder, compact):
    """Return times and peak memory of our step; without the encoder if ``encoder`` is None."""
    free()
    with_encoder = encoder is not None
    encoder = encoder or Rows(shape.batch, shape.dim).to(device)
    model, batches = make_problem(shape, encoder, device, compact=compact)
    answer = {"data": fingerprint(model, batches)}
    free()
    model.train()
    optimizer = Optimizer(model, STAGE)
    step = stepper(shape, model, optimizer, batches, captured=given.captured)
    answer["step_ms"] = median_ms(step, given.repeat)
    answer["peak_gib"] = gib()
    if not given.captured:
        parts = step_by_parts(shape, model, optimizer, batches, given.repeat)
        answer |= {"parts_ms": parts, "all_but_encoder_ms": all_but_encoder(parts)}
    if with_encoder:
        # the encoder runs uncompiled if compilation fails
        answer["compiled"] = getattr(encoder, "_compiled", None) is not None
    elif not given.no_kernels and runs_triton(model.labels.weight):
        from gpu_kernels import kernel_times  # isort: skip  # Triton may be missing

        state = optimizer.kernels.label_state
        answer["kernels_ms"] = kernel_times(shape, model, batches, given.repeat, state)
    return answer


def all_but_encoder(parts):
    """Return the time without the encoder, measured in a step that keeps the GPU busy."""
    return sum(value for part, value in parts.items() if not part.startswith("encoder"))


def naive_side(shape, device, given, encoder):
    """Return times and peak memory of the naive step, on our graph and batches."""
    free()
    with_encoder = encoder is not None
    encoder = encoder or Rows(shape.batch, shape.dim).to(device)
    encoder.train()
    model, batches = make_problem(shape, encoder, device, compact=False)
    answer = {"data": fingerprint(model, batches)}
    naive = NaiveStep(shape, model)
    del model  # the naive step holds its tables
    free()
    optimizer = None
    if with_encoder:
        optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-5, fused=True)
    step = naive_stepper(naive, encoder, batches, optimizer)
    answer["step_ms"] = median_ms(step, max(5, given.repeat // 2))
    answer["peak_gib"] = gib()
    marks = Marks()
    for i in range(8):
        marks.begin()
        step(i, marks)
    parts = marks.medians()
    return answer | {"parts_ms": parts, "all_but_encoder_ms": all_but_encoder(parts)}


def encoder_alone(shape, encoder, device, repeat):
    """Return forward and backward times of the encoder, in ms."""
    small = shape._replace(n_labels=1000, n_clusters=16, n_edges=64)
    _, batches = make_problem(small, encoder, device, compact=False)
    encoder.train()

    def both(i):
        encoder(batches[i % len(batches)].tokens).sum().backward()
        encoder.zero_grad(set_to_none=True)

    return median_ms(both, repeat)


def measure_whole(shape, device, given, keep):
    for compiled in [] if given.no_whole else given.compile:
        suffix = "" if compiled == "off" else f" {compiled}"
        encoder = partial(text_encoder, shape, device, compiled)
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
        results.attempt(f"{shape.name} {name}", work)

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
            keep(
                "naive whole",
                lambda: naive_side(shape, device, given, text_encoder(shape, device)),
            )


def of_shape(shape, results):
    """Return the entries of a shape by kind."""
    start = f"{shape.name} "
    entries = results.entries.items()
    return {key.removeprefix(start): entry for key, entry in entries if key.startswith(start)}


def naive_of(name, entries):
    """Return the naive entry to compare an entry with."""
    kind = "head" if "head" in name else "whole" if "whole" in name else "encoder"
    return entries.get(f"naive {kind}", {})


def step_rows(shape, entries):
    published = {"head": shape.head_ms, "encoder": shape.encoder_ms, "whole": shape.step_ms}
    for name, entry in entries.items():
        theirs = published[name.removeprefix("naive ").split()[0]]
        ours = entry.get("step_ms", entry.get("ms"))
        naive = {} if name.startswith("naive") else naive_of(name, entries)
        peak = entry.get("peak_gib")
        yield (
            shape.name,
            name,
            ms(ours),
            ms(theirs),
            ratio(theirs, ours),
            ratio(naive.get("step_ms"), ours),
            ms(peak),
            ratio(shape.peak_gib, peak),
        )


def part_rows(shape, entries):
    """Yield the six parts of each of our steps and of the naive step."""
    ours = {name: entry for name, entry in entries.items() if not name.startswith("naive")}
    timed = {name: entry["parts_ms"] for name, entry in ours.items() if "parts_ms" in entry}
    for name, parts in (timed or {"head": {}, "whole": {}}).items():
        beside = naive_of(name, entries).get("parts_ms", {})
        for part, timed_as in PARTS.items():
            own, naive = (
                sum(times[name] for name in timed_as if name in times) if times else None
                for times in (parts, beside)
            )
            if own is not None or naive is not None:
                yield shape.name, name, part, ms(own), ms(naive), ratio(naive, own)


def report(shapes, results):
    by_shape = [(shape, of_shape(shape, results)) for shape in shapes]
    header = ("shape", "what", "ms", "SPEC ms", "SPEC/it", "naive/it", "peak GiB", "SPEC/peak")
    table("training step", header, [row for pair in by_shape for row in step_rows(*pair)])
    header = ("shape", "what", "part", "ms", "naive ms", "naive/it")
    title = "its parts (backward and update with the encoder's; ours has the classifier's gradients"
    title += " in the classifier)"
    table(title, header, [row for pair in by_shape for row in part_rows(*pair)])
    for shape, entries in by_shape:
        if len({str(entry["data"]) for entry in entries.values() if "data" in entry}) > 1:
            print(f"{shape.name}: NOT ON THE SAME DATA, see the JSON")
        for name, entry in entries.items():
            for kind in ("parts_ms", "kernels_ms"):
                parts = entry.get(kind) or {}
                line = ", ".join(f"{part} {ms(value)}" for part, value in parts.items())
                if line:
                    print(f"{shape.name} {name} {kind}: {line}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="benchmarks/results")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(KNOWN))
    parser.add_argument("--device", default="cuda", help="cpu: to test the script with shape tiny")
    parser.add_argument("--storage", nargs="+", default=None, choices=["full", "compact"])
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, one storage")
    parser.add_argument("--no-naive", action="store_true")
    parser.add_argument(
        "--captured", action="store_true", help="losses and gradients as a CUDA graph"
    )
    parser.add_argument("--no-head", action="store_true")
    parser.add_argument("--no-whole", action="store_true")
    parser.add_argument(
        "--no-kernels", action="store_true", help="skip the times of single kernels"
    )
    parser.add_argument(
        "--no-encoder", action="store_true", help="skip the times of the encoder alone"
    )
    parser.add_argument("--name", default="gpu_step", help="name of the JSON file")
    parser.add_argument(
        "--compile",
        nargs="+",
        default=["off"],
        choices=["off", "on"],
        help="compilation of the encoder; on takes about a minute per shape",
    )
    given = parser.parse_args()
    if given.quick:
        given.repeat = min(given.repeat, 10)
    device = torch.device(given.device)
    if device.type == "cpu":  # a CPU cannot train compact labels
        given.storage = ["full"]
    given.storage = given.storage or (["compact"] if given.quick else ["compact", "full"])
    results = Results(given.out, given.name)
    shapes = [KNOWN[name] for name in given.shapes]
    with tensor_cores():
        for shape in shapes:
            measure(shape, device, given, results)
    report(shapes, results)


if __name__ == "__main__":
    main()
