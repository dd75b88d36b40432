"""``elias info``, ``elias report`` and ``elias presets``: describe models, runs and presets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

import elias
from elias.cli import console, options
from elias.config import EliasConfig, preset_names, preset_summary

if TYPE_CHECKING:
    from elias.config import EncoderConfig, ResolvedConfig, ResolvedIndex, ResolvedStage
    from elias.rerank.reranker import Reranker

    Because = Callable[[str, str], str]
    """Function that takes the value and the key of a setting, and adds the reason to the value."""

_INDEX_SIZES = {
    "clusters C": "n_clusters",
    "edges per cluster κ": "edges_per_cluster",
    "beam b": "beam_size",
    "shortlist K": "shortlist_size",
}


def info(
    model: options.ModelPath,
    verify: Annotated[
        bool, Option("--verify", help="Only verify the checksums of all files.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Show the sizes, the training and the metrics of a saved model."""
    if verify:
        _verify(model, as_json=as_json)
        return
    from elias.data.splits import TRAINING_SKETCH

    loaded = elias.Elias.from_pretrained(model, device="cpu")
    n_parameters = sum(weights.numel() for weights in loaded.model.parameters())
    if as_json:
        sizes = {"model": str(model), "labels": loaded.n_labels, "parameters": n_parameters}
        metadata = {k: v for k, v in loaded.metadata.items() if k != TRAINING_SKETCH}
        console.print_json({**sizes, "config": loaded.config.to_dict(), **metadata})
        return
    rows = dict(config_rows(loaded.config)) | {"ranker": _describe_reranker(loaded.reranker)}
    if validation := loaded.metadata.get("data", {}).get("splits", {}).get("validation"):
        rows["validation points"] = f"{validation['points']:,}"  # split of the corpus
    console.print_out(console.grid([*_model_rows(loaded, n_parameters), *rows.items()]))
    metrics = loaded.metadata.get("metrics", {})
    for split in dict.fromkeys(split for splits in metrics.values() for split in splits):
        console.print_out("", *console.stage_table(loaded, split))


def _verify(model: str | Path, *, as_json: bool) -> None:
    from elias.persistence.hub import find_model
    from elias.persistence.manifest import verify_files

    paths = verify_files(find_model(model))
    size = sum(path.stat().st_size for path in paths)
    if as_json:
        console.print_json({"model": str(model), "files": len(paths), "bytes": size})
    else:
        console.print_out(f"{len(paths)} files, {size:,} bytes: all SHA-256 checksums are correct")


def _model_rows(model: elias.Elias, n_parameters: int) -> list[tuple[str, Any]]:
    from elias.progress import seconds

    metadata = model.metadata
    timings, pruned, edges = metadata.get("timings", {}), metadata.get("pruned"), None
    if pruned is not None:
        by_threshold = "threshold" in pruned
        rule = f"at {pruned['threshold']:g}" if by_threshold else f"to {pruned['top_k']} each"
        edges = f"{pruned['after']:,} of {pruned['before']:,}, pruned {rule}"
    splits = metadata.get("data", {}).get("splits", {})
    return [
        ("labels", f"{model.n_labels:,} ({', '.join(model.label_names[:3])}, …)"),
        ("parameters", n_parameters),
        ("training points", splits.get("train", {}).get("points")),
        ("training time", seconds(sum(timings.values())) if timings else None),
        ("edges", edges),
        ("stored weights", "8 bits (compact)" if metadata.get("compact") else None),
        *probability_rows(metadata.get("probabilities", {})),
    ]


def probability_rows(results: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the calibration metrics of a model as (name, value) rows."""
    rows = [
        (f"ECE@5 {name}", f"{error['after']:.2f}% ({error['before']:.2f}% before calibration)")
        for name, error in results.get("errors", {}).items()
    ]
    if best := results.get("f1"):
        quality = f"precision {best['precision']:.1f}%, recall {best['recall']:.1f}%"
        rule = console.describe_rule(best["threshold"], keep_best=best.get("keep_best", False))
        rows.append(("best F1", f"{rule} ({quality})"))
    return rows


def config_rows(
    config: ResolvedConfig, reasons: Mapping[str, str] | None = None
) -> list[tuple[str, Any]]:
    """Return a resolved configuration as (name, value) rows. ``reasons`` explain derived values."""

    def because(value: str, key: str) -> str:
        reason = (reasons or {}).get(key)
        return f"{value} ({reason})" if reason else value

    held_out = f"{config.eval.validation_size:,}"
    return [
        ("encoder", _describe_encoder(config.encoder, because)),
        *_index_rows(config.index, because),
        ("validation points", because(held_out, "eval.validation_size")),
        *(row for stage in config.stages for row in _stage_rows(stage, config.encoder, because)),
        ("ranker", _describe_ranker_config(config, because)),
        ("members", config.ensemble.members if config.ensemble.members > 1 else None),
        ("seed", config.seed),
    ]


def _stage_rows(
    stage: ResolvedStage, encoder: EncoderConfig, because: Because
) -> list[tuple[str, str]]:
    """Return a row for the task and the duration of a stage, and one for its optimizer."""
    names = {"encoder_lr": "encoder", "bag_lr": "vectors", "label_lr": "labels"}
    if encoder.kind == "transformer":
        del names["bag_lr"]
    if not stage.score_all:
        names["cluster_lr"] = "clusters"
    if stage.learn_graph:
        names["edge_lr"] = "edges"
    names |= {"label_eps": "ε of labels", "weight_decay": "weight decay"}
    rates = ", ".join(f"{title} {getattr(stage, name):g}" for name, title in names.items())
    return [
        (stage.name, _describe_stage(stage, because)),
        (f"{stage.name} rates", because(rates, f"stages.{stage.name}.rates")),
    ]


def _describe_stage(stage: ResolvedStage, because: Because) -> str:
    task, key = "learns the graph", f"stages.{stage.name}"
    if not stage.learn_graph:
        task = "scores every label" if stage.score_all else "fixed graph"
        task = because(task, f"{key}.score_all")
    plural = "s" * (stage.epochs != 1)
    epochs = because(f"at most {stage.epochs} epoch{plural}", f"{key}.epochs")
    return f"{task}; {epochs} in {because(f'batches of {stage.batch_size}', f'{key}.batch_size')}"


def _describe_encoder(encoder: EncoderConfig, because: Because) -> str:
    if encoder.kind == "bag":
        return f"bag of words, {encoder.dim} dimensions"
    windows = f"{encoder.windows} × " if encoder.windows > 1 else ""
    length = because(f"{windows}{encoder.max_length} tokens", "encoder.max_length")
    pooling = because(str(encoder.pooling), "encoder.pooling")
    bottleneck = f", bottleneck {encoder.bottleneck}" if encoder.bottleneck else ""
    return f"{encoder.model}, {length}, {pooling}{bottleneck}"


def _index_rows(index: ResolvedIndex, because: Because) -> list[tuple[str, Any]]:
    if index.kind == "all":
        storage = ", stored in bfloat16" if index.label_storage == "compact" else ""
        scored = because(f"none, every label is scored{storage}", "index.kind")
        return [("index", f"{scored}; index.kind=graph learns one")]
    rows = {
        title: because(f"{getattr(index, key):,}", f"index.{key}")
        for title, key in _INDEX_SIZES.items()
    }
    if index.train_shortlist != index.shortlist_size:
        rows["shortlist K"] += f"; {index.train_shortlist:,} while training"
    return [*rows.items(), ("α, β", f"{index.alpha:g}, {index.beta:g}")]


def _describe_ranker_config(config: ResolvedConfig, because: Because) -> str:
    from elias.rerank.calibration import MIN_POINTS
    from elias.rerank.reranker import is_calibrated

    rerank = config.rerank
    if not rerank.enabled:
        return f"{because('none', 'rerank.enabled')}; rerank.enabled=true trains one"
    n_held_out, every_label = config.eval.validation_size, config.ranks_every_label
    calibrated = is_calibrated(rerank, n_held_out, every_label=every_label)
    task = "over every label" if every_label else f"over the best {rerank.candidates} labels"
    if calibrated:
        task += ", then calibrated" + ", using label names if they are words" * rerank.names
    if rerank.choose_cost and n_held_out >= MIN_POINTS:
        task += ", with a C chosen on held-out points"
    if rerank.word_ngrams and rerank.char_ngrams == (0, 0):
        task += because(", by words alone", "rerank.char_ngrams")
    if config.ensemble.members == 1 and n_held_out and (every_label or calibrated):
        task += ", finally trained on the held-out points too"
    return f"{task}; rerank.enabled=false trains none"


def _describe_reranker(reranker: Reranker | None) -> str:
    """Describe the components that rescore the labels after the last stage."""
    if reranker is None:
        return "none"
    power = reranker.sharpness
    score = f"p^{1 / power:g}·q" if power > 1 else "p·q" if power == 1 else f"p·q^{power:g}"
    calibrated = "" if reranker.calibration is None else ", calibrated"
    return score + calibrated + ("" if reranker.by_name is None else ", with label names")


@options.expand_groups
def report(
    *,
    run: options.RunPath,
    data: Annotated[
        Path | None,
        Argument(metavar="[DATA]", help="The corpus (default: the path recorded in training)."),
    ] = None,
    out: Annotated[
        Path | None, Option(metavar="FILE", help="The file to write (default: RUN/report.html).")
    ] = None,
    reading: options.CorpusOptions,
    device: options.DeviceName = "auto",
) -> None:
    """Write an HTML report of a run with metrics, plots as in the paper, examples and settings."""
    from elias.report.report import write_report

    columns = {name: value for name, value in reading.arguments().items() if value is not None}
    path = write_report(run, data, out=out, reading=columns or None, device=device)
    console.note("open the file in a browser; it needs no network")
    typer.echo(path)


def presets(as_json: options.AsJson = False) -> None:
    """List the presets with their purpose, encoder and epochs."""
    configs = {name: EliasConfig.preset(name) for name in preset_names()}
    if as_json:
        summaries = {
            name: {"summary": preset_summary(name), "config": config.to_dict()}
            for name, config in configs.items()
        }
        console.print_json(summaries)
        return
    rows = []
    for name, config in configs.items():
        epochs = " + ".join(str(stage.epochs or "derived") for stage in config.stages)
        rows.append([name, preset_summary(name), config.encoder.kind, epochs])
    console.print_out(console.columns(["preset", "for", "encoder", "epochs"], rows, n_left=4))
