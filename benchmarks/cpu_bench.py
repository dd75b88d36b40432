"""Run the benchmarks of `make bench`: training step, prediction and preparation on a CPU.

    python benchmarks/cpu_bench.py --out RESULTS

Prints one table: our CPU time, that of a simple baseline, and the ratio. Baselines: the step of
`naive_step.py`; the product with every label; the whole of M'Y by scipy; scikit-learn's tf-idf and
random forest.
"""

import argparse
import os
from functools import partial
from pathlib import Path

import cpu_predict
import cpu_step
import numba
import numpy as np
import scale_cpu
import torch
from cpu_setup import Parts, write_json
from scipy.sparse import csr_matrix
from sklearn.ensemble import RandomForestClassifier
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.pipeline import FeatureUnion

from elias.rerank.calibration import FOREST_LEAF, TREE_DEPTH, Calibration


def parsed(module, *options):
    parser = argparse.ArgumentParser()
    module.arguments(parser)
    return parser.parse_args(options)


def steps(quick):
    """Yield (what, unit, ours, plain) for training steps on one thread."""
    threads = torch.get_num_threads(), numba.get_num_threads()
    torch.set_num_threads(1)
    numba.set_num_threads(1)
    cpu_step.measure(cpu_step.TINY, 2, with_naive=False)  # compile first
    for shape in cpu_step.SHAPES[: 1 if quick else None]:
        results = cpu_step.measure(shape, 8, with_naive=True)
        for part in cpu_step.PARTS:
            ours, naive = (results[who][part] for who in ("ours", "naive"))
            yield f"step, {shape.name} labels: {part}", "ms", ours, naive
        ours, naive = (sum(results[who].values()) for who in ("ours", "naive"))
        yield f"step, {shape.name} labels: all", "ms", ours, naive
    torch.set_num_threads(threads[0])
    numba.set_num_threads(threads[1])


def predictions(quick):
    labels = "20000" if quick else "100000"
    given = parsed(cpu_predict, "--labels", labels, "--repeat", "100")
    for row in cpu_predict.measure(given):
        what = f"one text in a batch of {row['batch']}, {int(labels):,} labels"
        yield what, "ms", row["cpu_ms"], row["every_label_cpu_ms"]


def plain_edges(given):
    """Return the CPU seconds of the whole M'Y by scipy."""
    parts, rng = Parts(), np.random.default_rng(given.seed)
    topics, labels, _ = scale_cpu.make_points(given, rng)
    n_clusters = 2 ** int(np.ceil(np.log2(max(2, given.labels / 100))))
    beams, scores = scale_cpu.make_beams(given, n_clusters, topics, rng)
    with parts.timed("  plain: M'Y by scipy"):
        places = np.arange(given.points + 1) * given.beam
        to_clusters = csr_matrix((scores.ravel(), beams.ravel(), places))
        (to_clusters.T.tocsr() @ labels).tocsr()
    return parts.rows[0]["cpu_s"]


def plain_features(given):
    """Return the CPU seconds of scikit-learn's words and character n-grams."""
    parts, texts = Parts(), scale_cpu.make_texts(given, np.random.default_rng(given.seed))
    union = FeatureUnion(
        [
            ("words", TfidfVectorizer(min_df=2, sublinear_tf=True)),
            (
                "n-grams",
                TfidfVectorizer(
                    analyzer="char_wb", ngram_range=(3, 5), min_df=2, sublinear_tf=True
                ),
            ),
        ]
    )
    with parts.timed("  plain: tf-idf by scikit-learn"):
        union.fit(texts)
        union.transform(texts)
    return parts.rows[0]["cpu_s"]


def surroundings(quick):
    size = "20000" if quick else "50000"
    given = parsed(scale_cpu, "--labels", size, "--points", size)
    rows = {row["part"]: row["cpu_s"] for row in scale_cpu.run(given)}
    tf_idf = sum(rows.pop(name) for name in list(rows) if name.startswith("tf-idf"))
    edges = "edges: A' = M'Y"
    yield f"{edges}, {size} points", "s", rows.pop(edges), plain_edges(given)
    yield f"tf-idf, {size} texts", "s", tf_idf, plain_features(given)
    for name, spent in rows.items():
        yield f"{name}, {size} labels", "s", spent, None


def forests(quick):
    """Yield the CPU seconds of the calibration's forest, and of scikit-learn's."""
    parts, rng = Parts(), np.random.default_rng(0)
    shape = n_points, n_candidates = (200 if quick else 1000), 200
    p = rng.beta(0.2, 6, shape).astype(np.float32)
    q = np.clip(p + rng.normal(0, 0.1, shape), 0, 1).astype(np.float32)
    relevant, frequencies = rng.random(shape) < p, rng.integers(1, 500, shape)
    points = np.repeat(np.arange(n_points), n_candidates)
    extra = [rng.random(shape, dtype=np.float32) for _ in range(2)]
    settings = {"leaf": FOREST_LEAF, "n_trees": 40, "extra": extra, "points": points}
    fit = partial(Calibration.fit, p, q, frequencies, relevant, **settings)
    fit()  # compile first
    with parts.timed("  ours: forest"):
        fit()
    forest = RandomForestClassifier(
        40, max_depth=TREE_DEPTH, min_samples_leaf=FOREST_LEAF, max_features=0.5, n_jobs=-1
    )
    features = np.stack([p, q, p * q, frequencies, *extra], axis=-1).reshape(-1, 6)
    with parts.timed("  plain: forest by scikit-learn"):
        forest.fit(features, relevant.ravel())
    ours, plain = (row["cpu_s"] for row in parts.rows)
    yield f"forest of 40 trees, {relevant.size:,} candidates", "s", ours, plain


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller sizes, for a quick look")
    parser.add_argument("--out", type=Path, help="folder for cpu_bench.json")
    given = parser.parse_args()
    rows = []
    for part in (steps, predictions, surroundings, forests):
        for what, unit, ours, plain in part(given.quick):
            rows.append({"what": what, "unit": unit, "ours": ours, "plain": plain})
            print(f"measured: {what}", flush=True)
            write_json(given.out, "cpu_bench.json", {"cores": os.cpu_count(), "rows": rows})
    print(f"\n{'CPU time':44s} {'ours':>10s} {'plain':>10s}  ratio")
    for row in rows:
        plain = row["plain"]
        rest = "" if plain is None else f" {plain:10.2f} {plain / max(row['ours'], 1e-9):6.1f}x"
        print(f"{row['what']:44s} {row['ours']:10.2f}{rest} {row['unit']}")


if __name__ == "__main__":
    main()
