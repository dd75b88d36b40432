"""Measure the encoder of a training step on a GPU: matrix products, share of the peak, float8.

    PYTHONPATH=src python3 benchmarks/gpu_encoder.py --out results
    PYTHONPATH=src python3 benchmarks/gpu_encoder.py --out results --data data/wordnet-related \
        --encoder MINILM

Texts are packed into one row of tokens, as in training. Their lengths are random, or, with --data
and --encoder (a folder), those of a corpus; the shape minilm then also has the folder's weights.
Operations are those of the matrix products of a forward and a backward pass over the tokens of the
texts (6 per weight and token, and 12 per pair of tokens that attend to each other, unit and layer);
neither filler tokens nor what attention computes again are counted.

Variants: ``bfloat16`` is autocast, as in training; ``throughout`` also stores weights, sums and
norms of the encoder in bfloat16 (the optimizer keeps float32); ``float8-tensor`` and ``float8-row``
are `float8_linear`, and ``throughout-float8-…`` both. ``loops`` are: launched kernel by kernel
(``eager``), compiled, captured as a CUDA graph, and both.
"""

import argparse
import re
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from float8_linear import SCALES, use_float8
from gpu_setup import SEED, Results, free, gib, median_ms, ms, ratio, table
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import BertConfig, BertModel

from elias.config import EncoderConfig
from elias.kernels.cuda_graphs import CapturedFunction, GraphRecorder
from elias.model.transformer import TransformerEncoder
from elias.text.batches import TokenBatch, fixed_size_batch
from elias.text.tokens import Tokens
from elias.training.stage import tensor_cores

PEAK = 989.0  # TFLOP/s of an H200 in dense bfloat16, by its data sheet
VARIANTS = [
    "bfloat16",
    *(f"float8-{scales}" for scales in SCALES),
    "throughout",
    *(f"throughout-float8-{scales}" for scales in SCALES),
]
LOOPS = ["both", "eager", "compiled", "captured"]
N_BATCHES = 3
OTHER = "pointwise"  # also norms, sums, embeddings, dropout and casts
CLASSES = {  # the first pattern that matches the name of a kernel decides
    OTHER: r"triton_(poi|red|per)",  # compiled; their names may contain those of matrix products
    "attention": r"flash|fmha|attention|_varlen",
    "matrix products": r"gemm|nvjet|cutlass|cublas|xmma|splitk|triton_tem|::(add)?b?mm|scaled_mm",
    "optimizer": r"multi_tensor|adam",
    "copies": r"memcpy|memset|copy_kernel|aten::copy_",
}


class Shape(NamedTuple):
    """Sizes of an encoder and of its batches."""

    layers: int
    width: int
    heads: int
    texts: int
    longest: int
    median: int | None
    """Median of random lengths; all texts have ``longest`` tokens if it is None."""


SHAPES = {
    "minilm": Shape(6, 384, 12, 512, 64, 23),
    "131K": Shape(12, 768, 12, 512, 32, None),
    "670K": Shape(12, 768, 12, 256, 128, None),
    "bert-mixed": Shape(12, 768, 12, 256, 256, 40),
}
KNOWN = SHAPES | {"tiny": Shape(2, 64, 2, 8, 16, 6)}


def random_tokens(shape, rng):
    """Return random texts whose lengths have a long tail, or are all the same."""
    n_texts = shape.texts * N_BATCHES
    lengths = np.full(n_texts, shape.longest)
    if shape.median:
        drawn = shape.median * np.exp(0.6 * rng.standard_normal(n_texts))
        lengths = drawn.round().astype(np.int64).clip(3, shape.longest)
    offsets = np.concatenate([[0], lengths.cumsum()])
    return Tokens(offsets, rng.integers(1000, 30_000, offsets[-1]).astype(np.int32))


def corpus_tokens(shape, given, rng, n_texts):
    """Return the tokens of random texts of a corpus."""
    from elias.data import load_corpus

    config = EncoderConfig(model=given.encoder, max_length=shape.longest)
    texts = load_corpus(given.data).train.texts
    rows = rng.permutation(len(texts))[:n_texts]
    return TransformerEncoder.from_config(config).tokenize([texts[int(row)] for row in rows])


def make_batches(shape, given, device):
    """Return batches of packed texts, each of one of the sizes of captured steps."""
    rng = np.random.default_rng(SEED)
    if given.data:
        tokens = corpus_tokens(shape, given, rng, shape.texts * N_BATCHES)
    else:
        tokens = random_tokens(shape, rng)
    rows = np.arange(len(tokens) // shape.texts * shape.texts).reshape(-1, shape.texts)
    options = {"pad_id": 0, "max_length": shape.longest, "packs": True}
    return [fixed_size_batch(tokens, part, **options).to(device) for part in rows]


def make_encoder(name, shape, given, device, variant):
    """Return an encoder, with the same weights in each variant."""
    torch.manual_seed(SEED)
    config = EncoderConfig(
        model=given.encoder or "random",
        max_length=shape.longest,
        pooling="mean",
        precision="bfloat16",
        compile="on",
        dropout=0.0,
    )
    if given.encoder and name == "minilm":
        encoder = TransformerEncoder.from_config(config)
    else:
        settings = BertConfig(
            num_hidden_layers=shape.layers,
            hidden_size=shape.width,
            num_attention_heads=shape.heads,
            intermediate_size=4 * shape.width,
        )
        tokenizer = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
        transformer = BertModel(settings, add_pooling_layer=False)
        encoder = TransformerEncoder(config, transformer, tokenizer)
    if "float8" in variant:
        use_float8(encoder.transformer, variant.rpartition("-")[2])
    encoder.to(device)
    if device.type == "cpu":  # packed as on a GPU; training pads there
        encoder.packs = lambda _: True
    if variant.startswith("throughout"):
        encoder.transformer.to(torch.bfloat16)
        encoder.packs = lambda _: True
        encoder._uses_bfloat16 = lambda _: False  # no autocast, which computes norms in float32
    return encoder


def operations(encoder, batch):
    """Return the floating point operations of the matrix products of a step."""
    layers = [part for part in encoder.transformer.modules() if isinstance(part, nn.Linear)]
    weights = sum(part.weight.numel() for part in layers)
    settings, lengths = encoder.transformer.config, batch.lengths().double()
    pairs = 12 * settings.hidden_size * settings.num_hidden_layers * (lengths**2).sum().item()
    return 6 * weights * lengths.sum().item() + pairs


class Pass:
    """A forward and a backward pass over a batch, from a random gradient of its embeddings."""

    def __init__(self, encoder, batches, device):
        self.encoder, self.batches = encoder, batches
        self.parameters = list(encoder.parameters())
        generator = torch.Generator().manual_seed(SEED)
        size = len(batches[0]), encoder.dim
        self.by_embedding = torch.randn(size, generator=generator).to(device)
        self.run = self.launch

    def launch(self, ids, offsets, **shape):
        with torch.enable_grad():
            embedding = self.encoder(TokenBatch(ids, offsets, **shape))
            outputs = torch.autograd.grad(
                embedding, self.parameters, self.by_embedding, allow_unused=True
            )
        return embedding.detach(), outputs

    def capture(self, device):
        self.run = CapturedFunction(self.launch, GraphRecorder(device), min_calls=0)

    def __call__(self, i=0):
        batch = self.batches[i % len(self.batches)]
        return self.run(batch.ids, batch.offsets, longest=batch.longest, filled=batch.filled)


def make_update(work):
    """Return a function that updates float32 weights by the last gradients with fused AdamW."""
    weights = work.parameters
    stored = [
        weight if weight.dtype == torch.float32 else weight.detach().float() for weight in weights
    ]
    optimizer = torch.optim.AdamW(stored, lr=1e-6, fused=True)
    casts = [pair for pair in zip(weights, stored, strict=True) if pair[0] is not pair[1]]

    @torch.no_grad()
    def update(gradients):
        for weight, gradient in zip(stored, gradients, strict=True):
            weight.grad = None if gradient is None else gradient.to(weight.dtype)
        optimizer.step()
        if casts:
            torch._foreach_copy_(*map(list, zip(*casts, strict=True)))

    return update


def profiled(step, device, repeat):
    """Return the ms of each class of kernels in a step, and the ms of the longest kernels."""
    kind = "CUDA" if device.type == "cuda" else "CPU"
    with torch.profiler.profile(
        activities=[getattr(torch.profiler.ProfilerActivity, kind)]
    ) as trace:
        for i in range(repeat):
            step(i)
        if device.type == "cuda":
            torch.cuda.synchronize()
    own = "self_cpu_time_total" if kind == "CPU" else "self_device_time_total"
    kernels = {
        event.key: getattr(event, own) / 1000 / repeat
        for event in trace.key_averages()
        if event.device_type.name == kind
    }
    classes = dict.fromkeys(CLASSES, 0.0)
    for name, time in kernels.items():
        named = (key for key, pattern in CLASSES.items() if re.search(pattern, name, re.I))
        classes[next(named, OTHER)] += time
    longest = sorted(kernels.items(), key=lambda item: -item[1])[:20]
    return classes, {name[:160]: round(time, 4) for name, time in longest}


def timed(name, shape, given, device, variant, loop):
    """Return the times of an encoder, its rate and the shares of its kernels."""
    free()
    torch._dynamo.reset()
    encoder = make_encoder(name, shape, given, device, variant)
    if loop in ("compiled", "both") and device.type == "cuda":
        encoder.prepare(device)
    batches = make_batches(shape, given, device)
    work = Pass(encoder, batches, device)
    if loop in ("captured", "both") and device.type == "cuda":
        work.capture(device)
    update = make_update(work)

    def step(i):
        update(work(i)[1])

    tokens = [int(batch.lengths().sum()) for batch in batches]
    counted = sum(operations(encoder, batch) for batch in batches) / len(batches)
    answer = {"tokens": sum(tokens) / len(tokens), "tflop": counted / 1e12}
    answer["ms"] = median_ms(work, given.repeat)
    answer["step_ms"] = median_ms(step, given.repeat)
    answer["tflop_per_s"] = answer["tflop"] / answer["ms"] * 1000
    answer["share_of_peak"] = answer["tflop_per_s"] / PEAK
    answer["peak_gib"] = gib()
    answer["classes_ms"], answer["kernels_ms"] = profiled(step, device, min(6, given.repeat))
    if device.type == "cuda":
        answer["used"] = {
            "compiled": encoder._compiled is not None,
            "captured": getattr(work.run, "has_graphs", False),
        }
    return answer


def relative(value, reference):
    return ((value.float() - reference.float()).norm() / reference.float().norm()).item()


def errors(name, shape, given, device, variant):
    """Return relative errors of embeddings and gradients, without dropout.

    Float8 and ``throughout`` are compared with autocast, autocast with float32.
    """
    free()

    def outputs(variant):
        encoder = make_encoder(name, shape, given, device, variant)
        if variant == "float32":
            encoder.precision = "float32"
        batches = make_batches(shape, given, device)[:1]
        embedding, gradients = Pass(encoder.eval(), batches, device)()
        names = [name for name, _ in encoder.named_parameters()]
        used = {n: g for n, g in zip(names, gradients, strict=True) if g is not None}
        return embedding, used

    reference = "float32" if variant == "bfloat16" else "bfloat16"
    (embedding, gradients), (expected, references) = outputs(variant), outputs(reference)
    each = {n: relative(gradients[n], references[n]) for n in references if "key.bias" not in n}
    worst = max(each, key=each.get)  # the gradient by the bias of keys is 0 but for rounding
    flat, flat_reference = (
        torch.cat([values[n].float().flatten() for n in each]) for values in (gradients, references)
    )
    return {
        "against": reference,
        "output": relative(embedding, expected),
        "gradients": relative(flat, flat_reference),
        "worst": {worst: each[worst]},
    }


def measure(name, given, device, results):
    shape = KNOWN[name]

    def keep(key, work):
        results.attempt(f"{name} {key}", work)

    for variant in [] if given.no_errors else given.variants:
        keep(f"{variant} errors", partial(errors, name, shape, given, device, variant))
    for loop in given.loops:
        for variant in given.variants:
            work = partial(timed, name, shape, given, device, variant, loop)
            keep(f"{variant} {loop}", work)


def report(results):
    rows, of_classes = [], []
    for key, entry in results.entries.items():
        if "ms" not in entry:
            continue
        shape, variant, loop = key.split()
        base = results.entries.get(f"{shape} bfloat16 {loop}", {})
        share = f"{100 * entry['share_of_peak']:.1f}%"
        faster = ratio(base.get("step_ms"), entry["step_ms"])
        step = ms(entry["step_ms"])
        rate = ms(entry["tflop_per_s"])
        rows.append((shape, variant, loop, ms(entry["ms"]), step, rate, share, faster))
        times = entry["classes_ms"]
        busy = sum(times.values())
        shares = [f"{100 * time / busy:.0f}%" for time in times.values()]
        of_classes.append((shape, variant, loop, ms(busy), *shares))
    header = ("shape", "variant", "loop", "ms", "with update", "TFLOP/s", "of peak", "bf16/it")
    table("forward and backward pass", header, rows)
    header = ("shape", "variant", "loop", "busy ms", *CLASSES)
    table("kernels, with the update", header, of_classes)
    header = ("shape", "variant", "against", "output", "gradients", "worst")
    errors = [
        (*key.split()[:2], e["against"], f"{e['output']:.4f}", f"{e['gradients']:.4f}", e["worst"])
        for key, e in results.entries.items()
        if "against" in e
    ]
    table("relative errors", header, errors)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", default="benchmarks/results")
    parser.add_argument("--name", default="gpu_encoder", help="name of the JSON file")
    parser.add_argument("--shapes", nargs="+", default=["131K", "minilm"], choices=list(KNOWN))
    parser.add_argument("--variants", nargs="+", default=VARIANTS, choices=VARIANTS)
    parser.add_argument("--loops", nargs="+", default=LOOPS, choices=LOOPS)
    parser.add_argument("--device", default="cuda", help="cpu: to test the script with shape tiny")
    parser.add_argument("--data", help="a corpus whose texts are used; needs --encoder")
    parser.add_argument("--encoder", help="folder of a pretrained model")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--no-errors", action="store_true", help="skip the relative errors")
    given = parser.parse_args()
    if given.data and not given.encoder:
        parser.error("--data needs --encoder, whose tokenizer splits the texts")
    results = Results(given.out, given.name)
    with tensor_cores():
        for name in given.shapes:
            measure(name, given, torch.device(given.device), results)
    report(results)


if __name__ == "__main__":
    main()
