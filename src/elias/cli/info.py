"""``elias info`` and ``elias presets``: what a model is, and what there is to start from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elias.cli import console
from elias.cli.calibrate import probability_rows
from elias.cli.options import AsJson

if TYPE_CHECKING:
    from elias.config import EliasConfig, EncoderConfig, ResolvedConfig, ResolvedIndex
    from elias.inference.predictor import Elias
    from elias.rerank import Reranker


def info(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A saved model, or a run.")],
    as_json: AsJson = False,
) -> None:
    """Describe a saved model: its sizes, its making, its metrics."""
    from elias.inference.predictor import Elias

    elias = Elias.from_pretrained(model, device="cpu")
    facts = {
        "model": str(model),
        "labels": elias.n_labels,
        "parameters": sum(p.numel() for p in elias.model.parameters()),
        "config": elias.config.to_dict(),
        **elias.metadata,
    }
    if as_json:
        typer.echo(json.dumps(facts, ensure_ascii=False))
        return
    metrics = elias.metadata.get("metrics", {})
    rows = dict(config_rows(elias.config)) | {"ranker": _ranker_of(elias.reranker)}
    console.print_out(console.grid([*_first_rows(elias, facts), *rows.items()]))
    for split in dict.fromkeys(split for found in metrics.values() for split in found):
        console.print_out("", *console.stage_table(metrics, split))


def _first_rows(elias: Elias, facts: dict[str, Any]) -> list[tuple[str, Any]]:
    train = facts.get("data", {}).get("splits", {}).get("train", {})
    timings = facts.get("timings", {})
    names = ", ".join(elias.label_names[:3])
    return [
        ("labels", f"{elias.n_labels:,} ({names}, …)"),
        ("parameters", facts["parameters"]),
        ("training points", train.get("points")),
        ("time to train", console.seconds(sum(timings.values())) if timings else None),
        ("edges", _pruned_line(facts.get("pruned"))),
        *probability_rows(facts.get("probabilities", {})),
    ]


def _pruned_line(pruned: dict[str, Any] | None) -> str | None:
    """Return how many edges pruning left, where a model was pruned."""
    if pruned is None:
        return None
    by = f"at {pruned['threshold']:g}" if "threshold" in pruned else f"to {pruned['top_k']} each"
    return f"{pruned['after']:,} of {pruned['before']:,}, pruned {by}"


def config_rows(config: ResolvedConfig) -> list[tuple[str, Any]]:
    """Return what a resolved configuration comes to, for a table of names and values."""
    stages = "; ".join(
        f"{stage.name}: {stage.epochs} epochs of {stage.batch_size}"
        f"{', learned graph' if stage.learn_graph else ''}"
        for stage in config.stages
    )
    return [
        ("encoder", encoder_line(config.encoder)),
        *_index_rows(config.index),
        ("validation points", config.eval.validation_size),
        ("stages", stages),
        ("ranker", ranker_line(config)),
        ("members", config.ensemble.members if config.ensemble.members > 1 else None),
        ("seed", config.seed),
    ]


def _ranker_of(reranker: Reranker | None) -> str:
    """Return what a model has after its stages."""
    if reranker is None:
        return "none"
    parts = [
        "p·q" if reranker.sharpness == 1 else f"p·q^{reranker.sharpness:g}",
        *(["calibrated"] if reranker.calibration is not None else []),
        *(["with the names of labels"] if reranker.by_name is not None else []),
    ]
    return ", ".join(parts)


def ranker_line(config: ResolvedConfig) -> str:
    """Return what comes after the stages, in a few words."""
    rerank = config.rerank
    if not rerank.enabled:
        return "none (rerank.enabled=true trains one)"
    named = ", with names of labels that are words" if rerank.names else ""
    held_out = rerank.calibrate and config.eval.validation_size
    calibrated = f", then calibrated{named}" if held_out else ""
    return f"over the best {rerank.candidates} labels{calibrated} (rerank.enabled=false: none)"


def _index_rows(index: ResolvedIndex) -> list[tuple[str, Any]]:
    if index.kind == "all":
        storage = ", held in bfloat16" if index.label_storage == "compact" else ""
        return [("index", f"none, every label is scored{storage}")]
    return [
        ("clusters C", index.n_clusters),
        ("edges per cluster κ", index.edges_per_cluster),
        ("beam b", index.beam_size),
        ("shortlist K", _shortlist(index)),
        ("α, β", f"{index.alpha:g}, {index.beta:g}"),
    ]


def _shortlist(index: ResolvedIndex) -> str:
    differs = index.train_shortlist != index.shortlist_size
    training = f", {index.train_shortlist:,} while training" if differs else ""
    return f"{index.shortlist_size:,}{training}"


def encoder_line(encoder: EncoderConfig) -> str:
    """Return the encoder in a few words."""
    if encoder.kind == "bag":
        return f"bag, {encoder.dim} wide"
    narrowed = f", narrowed to {encoder.bottleneck}" if encoder.bottleneck else ""
    return f"{encoder.model}, {encoder.max_length} tokens, {encoder.pooling}{narrowed}"


def presets(as_json: AsJson = False) -> None:
    """List the presets: what each is for, its encoder, its stages."""
    from elias.config import EliasConfig, preset_names, preset_summary

    configs = {name: EliasConfig.preset(name) for name in preset_names()}
    if as_json:
        facts = {
            name: {"summary": preset_summary(name), "config": config.to_dict()}
            for name, config in configs.items()
        }
        typer.echo(json.dumps(facts, ensure_ascii=False))
        return
    rows = [
        [name, preset_summary(name), config.encoder.kind, _epochs(config)]
        for name, config in configs.items()
    ]
    console.print_out(console.columns(["preset", "for", "encoder", "epochs"], rows, n_left=4))


def _epochs(config: EliasConfig) -> str:
    return " + ".join(str(stage.epochs) for stage in config.stages)
