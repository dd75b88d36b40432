"""Measure prediction on a GPU: ms per point by batch size, with a naive search for comparison.

PYTHONPATH=src python3 benchmarks/gpu_predict.py --out results --quick

SPEC §8 has the figures of the published program. With --as-users, measures what `Elias.predict`
does after tokenization: calls with one batch and with 16 batches, from tokens on the host to
labels on the host, in wall-clock time. CUDA graphs of earlier calls are reused, as they are for
users.
"""

import argparse
import statistics
import time
import traceback
from contextlib import nullcontext

import numpy as np
import torch
from gpu_setup import (
    KNOWN,
    SHAPES,
    Results,
    Rows,
    attempt,
    free,
    gib,
    make_problem,
    median_ms,
    ms,
    ratio,
    table,
    text_encoder,
)
from naive_step import NaiveStep

from elias.model.batch_inference import SEARCH_GRAPHS, can_capture, rank_all
from elias.model.elias import SearchSizes
from elias.text.tokens import Tokens
from elias.training.stage import tensor_cores

TOP_K = 100
BULK = 16  # batches of a long call
WARM = 12  # calls after which a shape is captured


def predict(shape, encoder, device, given, batch_size):
    """Return ms per batch of prediction, of the encoder alone, and of the search alone."""
    sized = shape._replace(batch=batch_size)
    model, batches = make_problem(sized, encoder, device, compact=device.type == "cuda")
    model.eval()
    sizes = SearchSizes(shape.beam_size, shape.shortlist_size)
    rows = torch.randn(batch_size, shape.dim, device=device)
    free()

    captured = SEARCH_GRAPHS.capture(model, sizes, TOP_K) if can_capture(model) else None
    use_graphs = given.captured and captured is not None
    given_as = [batch.tokens for batch in batches]

    def whole(i):
        batch = given_as[i % len(batches)]
        if use_graphs:
            return captured(batch.ids, batch.offsets, longest=batch.longest, filled=batch.filled)
        return model.rank(encoder(batch).float(), sizes, TOP_K)

    with torch.inference_mode():
        answer = {
            "ms": median_ms(whole, given.repeat),
            "encoder_ms": median_ms(lambda i: encoder(batches[i % 4].tokens), given.repeat),
            "search_ms": median_ms(lambda i: model.rank(rows, sizes, TOP_K), given.repeat),
        }
    answer |= {"peak_gib": gib(), "ms_per_point": answer["ms"] / batch_size}
    if captured is not None:
        captured.release()
    if not given.no_naive:
        answer["naive_ms"] = attempt(lambda: naive_predict(sized, model, batches, given))
    return answer


def naive_predict(shape, model, batches, given):
    """Return ms per batch of the naive search with a plain encoder, on the same data."""
    device = model.graph.edge_labels.device
    encoder = model.encoder if given.no_encoder else text_encoder(shape, device).eval()
    naive = NaiveStep(shape, model)

    def whole(i):
        return naive.rank(encoder(batches[i % len(batches)].tokens).float(), TOP_K)

    with torch.inference_mode():
        return median_ms(whole, max(5, given.repeat // 2))


def predict_as_users(shape, encoder, device, given, batch_size):
    """Return ms of a call with one batch, and ms per point of calls with 16 batches."""
    model, _ = make_problem(shape, encoder, device, compact=device.type == "cuda")
    model.eval()
    sizes = SearchSizes(shape.beam_size, shape.shortlist_size)
    rng = np.random.default_rng(0)
    free()

    def call_ms(n_texts, warm, repeat):
        offsets = np.arange(n_texts + 1) * shape.n_tokens
        times = []
        for _ in range(warm + repeat):
            ids = rng.integers(1000, 30_522, offsets[-1]).astype(np.int32)
            begun = time.perf_counter()
            rank_all(model, Tokens(offsets, ids), sizes, TOP_K, batch_size=batch_size)
            times.append(1000 * (time.perf_counter() - begun))
        return statistics.median(times[warm:])

    one = call_ms(batch_size, WARM, given.repeat)
    many = call_ms(BULK * batch_size, 1, max(3, given.repeat // BULK))
    answer = {"ms": one, "bulk_ms_per_point": many / (BULK * batch_size)}
    return answer | {"peak_gib": gib(), "ms_per_point": one / batch_size}


def read_options():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="benchmarks/results")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(KNOWN))
    parser.add_argument("--device", default="cuda", help="cpu: to test the script with shape tiny")
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 32, 512])
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="10 repeats, encoder not compiled")
    parser.add_argument("--compile", default=None, choices=["off", "on"])
    parser.add_argument("--captured", action="store_true", help="use CUDA graphs")
    parser.add_argument("--no-encoder", action="store_true")
    parser.add_argument("--no-naive", action="store_true")
    parser.add_argument("--as-users", action="store_true", help="measure what Elias.predict calls")
    given = parser.parse_args()
    if given.as_users and given.no_encoder:
        parser.error("--as-users needs an encoder")
    if given.quick:
        given.repeat = 10
    given.compile = given.compile or ("off" if given.quick else "on")
    return given


def main():
    given = read_options()
    device = torch.device(given.device)
    measure = predict_as_users if given.as_users else predict
    results = Results(given.out, "gpu_predict_as_users" if given.as_users else "gpu_predict")
    rows = []
    with nullcontext() if given.as_users else tensor_cores():
        for name in given.shapes:
            shape = KNOWN[name]
            for batch_size in sorted({*given.batches, shape.batch}):
                try:
                    encoder = (
                        Rows(batch_size, shape.dim).to(device)
                        if given.no_encoder
                        else text_encoder(shape, device, given.compile)
                    )
                    entry = measure(shape, encoder, device, given, batch_size)
                except Exception as error:
                    entry = {"error": f"{type(error).__name__}: {error}"}
                    traceback.print_exc()
                results(f"{name} batch {batch_size}", entry)
                # the published batch, or a larger one
                theirs = shape.predict_ms if batch_size >= shape.batch else None
                rows.append(
                    (
                        name,
                        batch_size,
                        *(ms(entry.get(key)) for key in ("ms", "encoder_ms", "search_ms")),
                        f"{entry.get('ms_per_point', 0):.4f}",
                        f"{entry['bulk_ms_per_point']:.4f}"
                        if "bulk_ms_per_point" in entry
                        else "-",
                        theirs or "-",
                        ratio(theirs, entry.get("ms_per_point")),
                        ms(entry.get("peak_gib")),
                        ms(entry.get("naive_ms")),
                        ratio(entry.get("naive_ms"), entry.get("ms")),
                    )
                )
                encoder = None
                torch._dynamo.reset()
                free()
    header = ("shape", "batch", "ms", "encoder", "search", "ms/point", "16 batches")
    header += ("SPEC", "SPEC/it", "GiB", "naive ms", "naive/it")
    who = " as users call it" if given.as_users else ""
    table(f"prediction{who}, top {TOP_K}, encoder compile={given.compile}", header, rows)


if __name__ == "__main__":
    main()
