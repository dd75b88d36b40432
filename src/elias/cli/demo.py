"""``elias demo``: train and query a model on a real corpus, in minutes on a CPU."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from elias import progress
from elias.cli import console, options
from elias.cli.errors import resumable_run
from elias.cli.train import show_plan

if TYPE_CHECKING:
    from elias.config import EliasConfig, ResolvedConfig
    from elias.data import Corpus
    from elias.inference.predictor import Elias


PRESET = "mesh-titles"
SYNTHETIC = {"n_points": 8_000, "n_labels": 2_000}
N_EXAMPLES = 5
TOP_K = 5


def demo(
    out: Annotated[Path, Option(metavar="DIR", help="The run folder.")] = Path("runs/demo"),
    synthetic: Annotated[
        bool, Option("--synthetic", help="Use a generated corpus; needs no network.")
    ] = False,
    device: options.DeviceName = "cpu",
    overwrite: options.Overwrite = False,
) -> None:
    """Train, evaluate and query a model on a real corpus (MEDLINE titles, MeSH headings).

    The corpus is stored next to the run folder. A second demo shows the finished run again.
    """
    from elias.inference.predictor import Elias
    from elias.report.html import seconds
    from elias.training.trainer import train

    start = time.monotonic()
    folder = _build_corpus(out.parent, synthetic)
    corpus = options.read_corpus(folder)
    corpus_time = time.monotonic() - start
    config = _config(synthetic)
    resolved = config.resolve(len(corpus.train), corpus.n_labels)
    if not overwrite and _is_finished(out, resolved):
        console.note(f"{out} is finished: showing its recorded results (--overwrite trains again)")
        _show_results(out, Elias.from_pretrained(out, device=device), corpus, {})
    else:
        show_plan(resolved, corpus)
        with resumable_run(out):
            model = train(config, corpus, out=out, device=device, overwrite=overwrite)
        _show_results(out, model, corpus, {"corpus": corpus_time})
        console.print_out(f"Total time: {seconds(time.monotonic() - start)}")
    console.print_out(_next_commands(out, folder, corpus))


def _build_corpus(parent: Path, synthetic: bool) -> Path:
    """Return the corpus folder next to the run; create it if it does not exist."""
    if not synthetic:
        from elias.data.demo import build_demo_corpus

        return build_demo_corpus(parent / PRESET)
    from elias.data.synthetic import write_synthetic

    folder = parent / f"synthetic-{SYNTHETIC['n_points']}x{SYNTHETIC['n_labels']}"
    return folder if folder.is_dir() else write_synthetic(folder, **SYNTHETIC)


def _config(synthetic: bool) -> EliasConfig:
    from elias.config import EliasConfig

    return EliasConfig() if synthetic else EliasConfig.preset(PRESET)


def _is_finished(run: Path, config: ResolvedConfig) -> bool:
    """Return whether the run folder has a model trained with exactly this configuration."""
    from elias.config import model_settings, read_tree
    from elias.errors import ConfigError
    from elias.persistence.manifest import MODEL_FOLDER
    from elias.training.run import CONFIG_FILE

    if not (run / MODEL_FOLDER).is_dir():
        return False
    try:
        return model_settings(read_tree(run / CONFIG_FILE)) == model_settings(config.to_dict())
    except ConfigError:
        return False


def _show_results(run: Path, model: Elias, corpus: Corpus, times: dict[str, float]) -> None:
    """Print the metrics of each stage, some predictions, the times and the model folder."""
    from elias.persistence.manifest import MODEL_FOLDER
    from elias.report.html import seconds
    from elias.training.run import read_records

    progress.enable(False)
    console.print_out("", *console.stage_table(model.metadata.get("metrics", {}), "test"), "")
    console.print_out(*_example_predictions(model, corpus))
    steps = {**times, **read_records(run).times()}
    rows = [(f"  {name}", seconds(value)) for name, value in steps.items()]
    console.print_out("Time of each step:", console.grid(rows), "")
    console.print_out(f"Model saved in {run / MODEL_FOLDER}")


def _example_predictions(model: Elias, corpus: Corpus) -> list[Any]:
    """Return the first test texts with their true and predicted labels."""
    test = corpus.split("test")
    texts = _texts(corpus)[:N_EXAMPLES]
    shown: list[Any] = [f"The first {len(texts)} test texts (✓: a true label):", ""]
    for row, ranking in enumerate(model.predict(texts, top_k=TOP_K)):
        true = test.labels.indices[test.labels.indptr[row] : test.labels.indptr[row + 1]]
        predicted = [
            f"{score:.2f} {'✓' if label_id in true else ' '} {label}"
            for label_id, label, score in zip(
                ranking.ids, ranking.labels, ranking.scores, strict=True
            )
        ]
        true_names = " | ".join(corpus.label_names[i] for i in true)
        rows = [("text", texts[row]), ("true", true_names), ("predicted", "\n".join(predicted))]
        shown += [console.grid(rows), ""]
    return shown


def _next_commands(run: Path, data: Path, corpus: Corpus) -> str:
    text = _texts(corpus)[0].replace('"', "").replace("$", "").replace("`", "")
    return (
        "\nCommands to try next:\n"
        f'  echo "{text}" | elias predict {run} -k 5\n'
        f'  elias explain {run} "{text}"\n'
        f"  elias evaluate {run} {data}\n"
        f"  elias report {run}\n"
        f"  elias info {run}"
    )


def _texts(corpus: Corpus) -> list[str]:
    texts = corpus.split("test").texts
    assert texts is not None
    return list(texts[:N_EXAMPLES])
