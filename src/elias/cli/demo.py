"""``elias demo``: the whole of it on a real corpus, in minutes, on a CPU."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elias import progress
from elias.cli import console
from elias.cli.errors import training
from elias.cli.options import DeviceName, Overwrite, read_corpus
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
    out: Annotated[Path, typer.Option(metavar="DIR", help="The run folder.")] = Path("runs/demo"),
    synthetic: Annotated[
        bool, typer.Option("--synthetic", help="Use a generated corpus; needs no network.")
    ] = False,
    device: DeviceName = "cpu",
    overwrite: Overwrite = False,
) -> None:
    """Train, evaluate and query a model on a real corpus (MEDLINE titles, MeSH headings).

    The corpus goes beside the run folder. A second demo shows the finished run again.
    """
    begin = time.monotonic()
    folder = _make_corpus(out.parent, synthetic)
    corpus = read_corpus(folder)
    making = time.monotonic() - begin
    config = _config(synthetic)
    resolved = config.resolve(len(corpus.train), corpus.n_labels)

    from elias.inference.predictor import Elias
    from elias.training.trainer import train

    if not overwrite and _is_finished(out, resolved):
        console.note(f"{out} is finished: showing what it recorded (--overwrite trains again)")
        model = Elias.from_pretrained(out, device=device)
        show(out, model, corpus, {})
    else:
        show_plan(resolved, corpus)
        with training(out):
            model = train(config, corpus, out=out, device=device, overwrite=overwrite)
        show(out, model, corpus, {"corpus": making})
        console.print_out(f"All in {console.seconds(time.monotonic() - begin)}")
    console.print_out(_what_next(out, folder, corpus))


def _make_corpus(parent: Path, synthetic: bool) -> Path:
    """Return the folder of the corpus beside the run, making it if it is not there."""
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
    """Say whether the run folder has a model of just this configuration."""
    from elias.config import decisive, read_tree
    from elias.errors import ConfigError
    from elias.persistence.manifest import MODEL_FOLDER
    from elias.training.run import CONFIG_FILE

    if not (run / MODEL_FOLDER).is_dir():
        return False
    try:
        return decisive(read_tree(run / CONFIG_FILE)) == decisive(config.to_dict())
    except ConfigError:
        return False


def show(run: Path, model: Elias, corpus: Corpus, times: dict[str, float]) -> None:
    """Print the stages' metrics, some predictions, the times and the place of the model."""
    from elias.persistence.manifest import MODEL_FOLDER
    from elias.training.run import read_records

    progress.enable(False)
    console.print_out("", *console.stage_table(model.metadata.get("metrics", {}), "test"), "")
    console.print_out(*_examples(model, corpus))
    steps = {**times, **read_records(run).times()}
    rows = [(f"  {name}", console.seconds(value)) for name, value in steps.items()]
    console.print_out("Time of each step:", console.grid(rows), "")
    console.print_out(f"Model saved in {run / MODEL_FOLDER}")


def _examples(model: Elias, corpus: Corpus) -> list[Any]:
    """Return the first test texts with their true labels and those the model finds."""
    test = corpus.split("test")
    assert test.texts is not None
    texts = list(test.texts[:N_EXAMPLES])
    shown: list[Any] = [f"The first {len(texts)} test texts (✓: a true label):", ""]
    for row, ranking in enumerate(model.predict(texts, top_k=TOP_K)):
        true = test.labels.indices[test.labels.indptr[row] : test.labels.indptr[row + 1]]
        names = [corpus.label_names[i] for i in true]
        found = [
            f"{score:.2f} {'✓' if label_id in true else ' '} {label}"
            for label_id, label, score in zip(
                ranking.ids, ranking.labels, ranking.scores, strict=True
            )
        ]
        rows = [("text", texts[row]), ("true", " | ".join(names))]
        shown += [console.grid([*rows, ("predicted", "\n".join(found))]), ""]
    return shown


def _what_next(run: Path, data: Path, corpus: Corpus) -> str:
    test = corpus.split("test")
    assert test.texts is not None
    text = test.texts[0].replace('"', "").replace("$", "").replace("`", "")
    return (
        "\nWhat to type next:\n"
        f'  echo "{text}" | elias predict {run} -k 5\n'
        f'  elias explain {run} "{text}"\n'
        f"  elias evaluate {run} {data}\n"
        f"  elias report {run}\n"
        f"  elias info {run}"
    )
