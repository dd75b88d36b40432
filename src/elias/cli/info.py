"""``elias info`` and ``elias presets``: describe a model, list the presets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elias.cli import console, options
from elias.cli.calibrate import probability_rows

if TYPE_CHECKING:
    from elias.config import EncoderConfig, ResolvedConfig, ResolvedIndex
    from elias.inference.predictor import Elias
    from elias.rerank import Reranker


def info(model: options.ModelPath, as_json: options.AsJson = False) -> None:
    """Describe a saved model: sizes, training, metrics."""
    from elias.inference.predictor import Elias

    elias = Elias.from_pretrained(model, device="cpu")
    n_parameters = sum(weights.numel() for weights in elias.model.parameters())
    if as_json:
        sizes = {"model": str(model), "labels": elias.n_labels, "parameters": n_parameters}
        console.print_json({**sizes, "config": elias.config.to_dict(), **elias.metadata})
        return
    rows = dict(config_rows(elias.config)) | {"ranker": _describe_reranker(elias.reranker)}
    console.print_out(console.grid([*_model_rows(elias, n_parameters), *rows.items()]))
    metrics = elias.metadata.get("metrics", {})
    for split in dict.fromkeys(split for splits in metrics.values() for split in splits):
        console.print_out("", *console.stage_table(metrics, split))


def _model_rows(elias: Elias, n_parameters: int) -> list[tuple[str, Any]]:
    from elias.report.html import seconds

    metadata = elias.metadata
    timings, pruned = metadata.get("timings", {}), metadata.get("pruned")
    edges = None
    if pruned is not None:
        rule = f"at {pruned['threshold']:g}"
        if "threshold" not in pruned:
            rule = f"to {pruned['top_k']} each"
        edges = f"{pruned['after']:,} of {pruned['before']:,}, pruned {rule}"
    return [
        ("labels", f"{elias.n_labels:,} ({', '.join(elias.label_names[:3])}, …)"),
        ("parameters", n_parameters),
        (
            "training points",
            metadata.get("data", {}).get("splits", {}).get("train", {}).get("points"),
        ),
        ("training time", seconds(sum(timings.values())) if timings else None),
        ("edges", edges),
        *probability_rows(metadata.get("probabilities", {})),
    ]


def config_rows(config: ResolvedConfig) -> list[tuple[str, Any]]:
    """Return a resolved configuration as (name, value) rows."""
    stages = "; ".join(
        f"{stage.name}: {stage.epochs} epochs of {stage.batch_size}"
        f"{', learned graph' if stage.learn_graph else ''}"
        for stage in config.stages
    )
    return [
        ("encoder", _describe_encoder(config.encoder)),
        *_index_rows(config.index),
        ("validation points", config.eval.validation_size),
        ("stages", stages),
        ("ranker", _describe_ranker_config(config)),
        ("members", config.ensemble.members if config.ensemble.members > 1 else None),
        ("seed", config.seed),
    ]


def _describe_reranker(reranker: Reranker | None) -> str:
    """Describe the components that rescore the labels after the last stage."""
    if reranker is None:
        return "none"
    parts = ["p·q" if reranker.sharpness == 1 else f"p·q^{reranker.sharpness:g}"]
    if reranker.calibration is not None:
        parts.append("calibrated")
    if reranker.by_name is not None:
        parts.append("with label names")
    return ", ".join(parts)


def _describe_ranker_config(config: ResolvedConfig) -> str:
    rerank = config.rerank
    if not rerank.enabled:
        return "none (rerank.enabled=true trains one)"
    names = ", with label names that are words" if rerank.names else ""
    calibrated = (
        f", then calibrated{names}" if rerank.calibrate and config.eval.validation_size else ""
    )
    return f"over the best {rerank.candidates} labels{calibrated} (rerank.enabled=false: none)"


def _index_rows(index: ResolvedIndex) -> list[tuple[str, Any]]:
    if index.kind == "all":
        storage = ", stored in bfloat16" if index.label_storage == "compact" else ""
        return [("index", f"none, every label is scored{storage}")]
    shortlist = f"{index.shortlist_size:,}"
    if index.train_shortlist != index.shortlist_size:
        shortlist += f", {index.train_shortlist:,} while training"
    return [
        ("clusters C", index.n_clusters),
        ("edges per cluster κ", index.edges_per_cluster),
        ("beam b", index.beam_size),
        ("shortlist K", shortlist),
        ("α, β", f"{index.alpha:g}, {index.beta:g}"),
    ]


def _describe_encoder(encoder: EncoderConfig) -> str:
    if encoder.kind == "bag":
        return f"bag of words, {encoder.dim} dimensions"
    bottleneck = f", bottleneck {encoder.bottleneck}" if encoder.bottleneck else ""
    return f"{encoder.model}, {encoder.max_length} tokens, {encoder.pooling}{bottleneck}"


def presets(as_json: options.AsJson = False) -> None:
    """List the presets: purpose, encoder, epochs of each stage."""
    from elias.config import EliasConfig, preset_names, preset_summary

    configs = {name: EliasConfig.preset(name) for name in preset_names()}
    if as_json:
        console.print_json(
            {
                name: {"summary": preset_summary(name), "config": config.to_dict()}
                for name, config in configs.items()
            }
        )
        return
    rows = []
    for name, config in configs.items():
        epochs = " + ".join(str(stage.epochs) for stage in config.stages)
        rows.append([name, preset_summary(name), config.encoder.kind, epochs])
    console.print_out(console.columns(["preset", "for", "encoder", "epochs"], rows, n_left=4))
