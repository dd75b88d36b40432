"""``elias demo``: train and query a model on a real corpus, in minutes on a CPU."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

from typer import Option

import elias
from elias import progress
from elias.cli import console, options
from elias.cli.train import next_commands, resumable_run, show_plan
from elias.config import EliasConfig, ResolvedConfig, model_settings, read_tree
from elias.errors import ConfigError

CORPUS = "mesh-titles"
SYNTHETIC = {"n_points": 8_000, "n_labels": 2_000}
N_EXAMPLES = 5
TOP_K = 5


def demo(
    out: Annotated[Path, Option(metavar="DIR", help="The run folder.")] = Path("runs/demo"),
    synthetic: Annotated[
        bool, Option("--synthetic", help="Use a generated corpus, which needs no internet access.")
    ] = False,
    device: options.DeviceName = "cpu",
    overwrite: options.Overwrite = False,
) -> None:
    """Train, evaluate and query a model on a real corpus (MEDLINE titles, MeSH headings).

    The corpus is stored next to the run folder. If the run is finished, its results are shown again
    without training.
    """
    from elias.data.corpus import resolve_config
    from elias.persistence.manifest import MODEL_FOLDER
    from elias.progress import seconds
    from elias.training.numba_cache import compile_in_background
    from elias.training.run import read_records

    start = time.monotonic()
    compile_in_background()
    folder = _build_corpus(out.parent, synthetic)
    corpus = elias.load_corpus(folder)
    times = {"corpus": time.monotonic() - start}
    config = EliasConfig()
    resolved = resolve_config(config, corpus)
    is_finished = not overwrite and _is_finished(out, resolved)
    if is_finished:
        console.note(f"{out} is finished; showing its results (use --overwrite to train again)")
        model, times = elias.Elias.from_pretrained(out, device=device), {}
    else:
        show_plan(config, resolved, corpus)
        with resumable_run(out):
            model = elias.train(corpus, config, out=out, device=device, overwrite=overwrite)
    progress.enable(False)
    console.print_out("", *console.stage_table(model, "test"), "")
    texts = list((corpus.split("test").texts or [])[:N_EXAMPLES])
    console.print_out(*_example_predictions(model, corpus, texts))
    times |= read_records(out).times()
    rows = [(f"  {name}", seconds(value)) for name, value in times.items()]
    console.print_out("Time of each step:", console.grid(rows), "")
    console.print_out(f"Model saved in {out / MODEL_FOLDER}")
    if not is_finished:
        console.print_out(f"Total time: {seconds(time.monotonic() - start)}")
    program = console.program()
    more = [f"{program} evaluate {quote(str(out))} {quote(str(folder))}"]
    more += [f"{program} report {quote(str(out))}", f"{program} info {quote(str(out))}"]
    commands = dict.fromkeys([*next_commands(out, corpus), *more])
    console.print_out("\nCommands to try next:", *(f"  {command}" for command in commands))


def _build_corpus(parent: Path, synthetic: bool) -> Path:
    """Return the corpus folder next to the run, and create it if it does not exist."""
    from elias.data.mesh_titles import build_demo_corpus
    from elias.data.synthetic import write_synthetic

    if not synthetic:
        return build_demo_corpus(parent / CORPUS)
    folder = parent / f"synthetic-{SYNTHETIC['n_points']}x{SYNTHETIC['n_labels']}"
    return folder if folder.is_dir() else write_synthetic(folder, **SYNTHETIC)


def _is_finished(run: Path, config: ResolvedConfig) -> bool:
    """Return whether the run folder has a model trained with exactly this configuration."""
    from elias.persistence.manifest import MODEL_FOLDER
    from elias.training.run import CONFIG_FILE

    if (run / MODEL_FOLDER).is_dir():
        with suppress(ConfigError):
            return model_settings(read_tree(run / CONFIG_FILE)) == model_settings(config.to_dict())
    return False


def _example_predictions(model: elias.Elias, corpus: elias.Corpus, texts: list[str]) -> list[Any]:
    """Return texts of the test split with their true and predicted labels."""
    true_labels = corpus.split("test").labels
    shown: list[Any] = [f"The first {len(texts)} test texts (✓ marks a true label):", ""]
    for row, labels in enumerate(model.predict(texts, top_k=TOP_K).to_dicts()):
        true = true_labels[row].indices
        predicted = [
            f"{console.likelihood(label.get('probability'), label['score']):>5} "
            f"{'✓' if label['id'] in true else ' '} {label['label']}"
            for label in labels
        ]
        true_names = " | ".join(corpus.label_names[i] for i in true)
        rows = [("text", texts[row]), ("true", true_names), ("predicted", "\n".join(predicted))]
        shown += [console.grid(rows), ""]
    return shown
