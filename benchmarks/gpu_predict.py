"""Prediction on a GPU: ms per point by batch size, beside a naive one and the figures of SPEC §8.

PYTHONPATH=src python3 benchmarks/gpu_predict.py --out results --quick
"""

import argparse
import traceback

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
    rectangle_of,
    table,
    text_encoder,
)
from naive_step import NaiveStep

from elias.model.elias import SearchSizes
from elias.model.inference import Ranking
from elias.training.loop import tensor_cores

TOP_K = 100


def predict(shape, encoder, device, given, batch_size):
    """Return ms per batch of the whole, of the encoder alone, and of the search alone."""
    sized = shape._replace(batch=batch_size)
    model, batches = make_problem(sized, encoder, device, compact=device.type == "cuda")
    model.eval()
    sizes = SearchSizes(shape.beam_size, shape.shortlist_size)
    rows = torch.randn(batch_size, shape.dim, device=device)
    free()

    ranking = Ranking(model, sizes, TOP_K)
    given_as = [batch.tokens for batch in batches]
    if given.captured and ranking.recorded is not None:
        given_as = [rectangle_of(tokens) for tokens in given_as]

    def whole(i):
        return ranking(given_as[i % len(batches)])

    with torch.inference_mode():
        answer = {
            "ms": median_ms(whole, given.repeat),
            "encoder_ms": median_ms(lambda i: encoder(batches[i % 4].tokens), given.repeat),
            "search_ms": median_ms(lambda i: model.rank(rows, sizes, TOP_K), given.repeat),
        }
    answer |= {"peak_gib": gib(), "ms_per_point": answer["ms"] / batch_size}
    ranking.close()
    if not given.no_naive:
        answer["naive_ms"] = attempt(lambda: naive_predict(sized, model, batches, given))
    return answer


def naive_predict(shape, model, batches, given):
    """Return ms per batch of the naive search behind an encoder as it is, on the same data."""
    device = model.graph.edge_labels.device
    encoder = model.encoder if given.no_encoder else text_encoder(shape, device).eval()
    naive = NaiveStep(shape, model)

    def whole(i):
        return naive.rank(encoder(batches[i % len(batches)].tokens).float(), TOP_K)

    with torch.inference_mode():
        return median_ms(whole, max(5, given.repeat // 2))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="benchmarks/results")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(KNOWN))
    parser.add_argument("--device", default="cuda", help="cpu: to try the script, shape tiny")
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 32, 512])
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="10 repeats, encoder not compiled")
    parser.add_argument("--compile", default=None, choices=["off", "on"])
    parser.add_argument("--captured", action="store_true", help="as CUDA graphs")
    parser.add_argument("--no-encoder", action="store_true")
    parser.add_argument("--no-naive", action="store_true")
    given = parser.parse_args()
    if given.quick:
        given.repeat = 10
    given.compile = given.compile or ("off" if given.quick else "on")
    device = torch.device(given.device)
    results, rows = Results(given.out, "gpu_predict"), []
    with tensor_cores():
        for name in given.shapes:
            shape = KNOWN[name]
            for batch_size in sorted({*given.batches, shape.batch}):
                try:
                    encoder = (
                        Rows(batch_size, shape.dim).to(device)
                        if given.no_encoder
                        else text_encoder(shape, device, given.compile)
                    )
                    entry = predict(shape, encoder, device, given, batch_size)
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
    header = ("shape", "batch", "ms", "encoder", "search", "ms/point", "SPEC", "SPEC/it", "GiB")
    header += ("naive ms", "naive/it")
    table(f"prediction, top {TOP_K}, encoder compile={given.compile}", header, rows)


if __name__ == "__main__":
    main()
