"""Compare the encoder pass of training over packed texts with padded ones, and with its ceiling.

    PYTHONPATH=src python3 benchmarks/packed_tokens.py --out results --encoder MINILM \
        --data data/wordnet-related data/eurlex57k-short --texts 512 256 --longest 64 256

A pass is forward and backward, of MiniLM's shape, or of the folder --encoder with its weights. The
same random texts of a corpus are packed into rows of tokens, padded in batches of similar length
(as training sorts them where texts are padded), and padded in random batches. Without --data, the
lengths of two corpora are drawn at random: short texts, and mixed ones whose 90th percentile is
three times the median. Shapes are those of captured steps (`fixed_size_batch`); on a GPU each
is captured as a CUDA graph, with --compile compiled before.

The ceiling of packing is the number of padded tokens over that of real ones: what packing would
gain if time were proportional to tokens.
"""

import argparse
from types import SimpleNamespace

import numpy as np
import torch
from gpu_encoder import KNOWN, SHAPES, Pass, corpus_tokens, make_encoder
from gpu_setup import SEED, Results, free, median_ms, ms, ratio, table

from elias.text.batches import fixed_size_batch, shuffled_batches
from elias.text.tokens import Tokens
from elias.training.stage import tensor_cores

LAYOUTS = ("packed", "padded, sorted", "padded, unsorted")
RANDOM = {"short": (22, 0.4), "mixed": (24, 0.9)}
"""Median and spread (of the logarithm) of random lengths."""


def random_tokens(median, spread, longest, n_texts, rng):
    lengths = (median * np.exp(spread * rng.standard_normal(n_texts))).round()
    offsets = np.concatenate([[0], lengths.clip(3, longest).cumsum()]).astype(np.int64)
    return Tokens(offsets, rng.integers(1000, 30_000, offsets[-1]).astype(np.int32))


def batches_of(tokens, layout, texts, longest, device):
    """Return full batches of one epoch in the shapes of captured steps."""
    rng = np.random.default_rng(SEED)
    by_length = layout == "padded, sorted"
    epoch = shuffled_batches(tokens.lengths, texts, rng, by_length=by_length)
    options = {"pad_id": 0, "max_length": longest, "packs": layout == "packed"}
    full = (rows for rows in epoch if len(rows) == texts)
    return [fixed_size_batch(tokens, rows, **options).to(device) for rows in full]


def measured(tokens, layout, texts, longest, given, device):
    """Return the time of a batch, the share of padding and the number of shapes."""
    free()
    torch._dynamo.reset()
    shape = KNOWN[given.shape]._replace(texts=texts, longest=longest)
    encoder = make_encoder("minilm", shape, given, device, "bfloat16")
    encoder.packs = lambda _: layout == "packed"
    if given.compile and device.type == "cuda":
        encoder.prepare(device)
    batches = batches_of(tokens, layout, texts, longest, device)
    work = Pass(encoder, batches, device)
    if device.type == "cuda":
        work.capture(device)
    real = sum(int(batch.lengths().sum()) for batch in batches)
    given_tokens = sum(len(batch.ids) for batch in batches)
    return {
        "ms": median_of_epoch(work, len(batches), given.repeat),
        "tokens": real / len(batches),
        "padding": 1 - real / given_tokens,
        "shapes": len({(len(batch.ids), batch.longest) for batch in batches}),
    }


def median_of_epoch(work, n_batches, repeat):
    """Return the mean over batches of an epoch, in the median of its repetitions."""

    def epoch(_):
        for i in range(n_batches):
            work(i)

    return median_ms(epoch, repeat) / n_batches


def tokens_of(name, data, texts, longest, given):
    """Return random texts of a corpus, or texts of random lengths."""
    rng = np.random.default_rng(SEED)
    n_texts = texts * given.batches
    if not data:
        return random_tokens(*RANDOM[name], longest, n_texts, rng)
    shape = SHAPES["minilm"]._replace(longest=longest)
    return corpus_tokens(shape, SimpleNamespace(encoder=given.encoder, data=data), rng, n_texts)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", default="benchmarks/results")
    parser.add_argument("--name", default="packed_tokens", help="name of the JSON file")
    parser.add_argument("--shape", default="minilm", choices=list(KNOWN))
    parser.add_argument("--data", nargs="+", help="corpora; they need --encoder")
    parser.add_argument(
        "--lengths", nargs="+", default=list(RANDOM), choices=list(RANDOM), help="without --data"
    )
    parser.add_argument("--encoder", help="folder of a pretrained model")
    parser.add_argument("--texts", nargs="+", type=int, default=[512, 256], help="of a batch")
    parser.add_argument("--longest", nargs="+", type=int, default=[64, 256], help="in tokens")
    parser.add_argument("--batches", type=int, default=50, help="batches of an epoch")
    parser.add_argument("--repeat", type=int, default=5, help="epochs")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", default="cuda", help="cpu: to test the script")
    given = parser.parse_args()
    if given.data and not given.encoder:
        parser.error("--data needs --encoder, whose tokenizer splits the texts")
    device, results, rows = torch.device(given.device), Results(given.out, given.name), []
    names = given.data or given.lengths
    for name, texts, longest in zip(names, given.texts, given.longest, strict=True):
        tokens = tokens_of(name, given.data and name, texts, longest, given)
        median, tenth = np.percentile(tokens.lengths, [50, 90])
        for layout in LAYOUTS:
            with tensor_cores():
                entry = measured(tokens, layout, texts, longest, given, device)
            packed = results.entries.get(f"{name}, {LAYOUTS[0]}", entry)
            entry |= {
                "median": median,
                "90th percentile": tenth,
                "ceiling": 1 / (1 - entry["padding"]),
            }
            entry["packed/it"] = entry["ms"] / packed["ms"]
            results(f"{name}, {layout}", entry)
            lengths, share = f"{median:.0f}, {tenth:.0f}", f"{100 * entry['padding']:.1f}%"
            numbers = entry["shapes"], ms(entry["ms"]), f"{entry['ceiling']:.2f}x"
            rows.append((name, lengths, layout, share, *numbers, ratio(entry["ms"], packed["ms"])))
    header = ("corpus", "lengths", "layout", "padding", "shapes", "ms", "ceiling", "packed is")
    table(
        "forward and backward pass of a batch (median and 90th percentile of lengths)", header, rows
    )


if __name__ == "__main__":
    main()
