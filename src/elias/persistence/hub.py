"""Download models from the Hugging Face hub, upload them, and write their model cards."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, errors, get_token, snapshot_download

import elias
from elias.config import ResolvedConfig
from elias.config.io import HUB_PREFIX, looks_like_path, numbers
from elias.errors import ModelError, quoted
from elias.persistence.manifest import model_folder

_HUB_ID = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
_WRITTEN_PREFIX = re.compile("hf:/{1,2}")  # pathlib turns hf:// into hf:/
_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"
_MODEL_FILES = [
    *("*.safetensors", "config.json", "labels.t*", "vocabulary.txt", "probabilities.json"),
    *("encoder/*", "ranker/*", "first_encoder/*", "members/*"),
]
"""Patterns of old model files, which a push deletes unless the new model has them too."""


def hub_id(name: str | Path) -> str | None:
    """Return ``user/model`` or ``user/model@revision`` for a hub model, or None for a folder.

    ``hf://user/model`` is always a hub model. A `Path`, or a string that looks like a path, is a
    folder. Any other string of the form ``user/model`` is a hub model.

    >>> hub_id("hf://user/model@v1"), hub_id("user/model@v1")
    ('user/model@v1', 'user/model@v1')
    >>> hub_id(Path("user/model")), hub_id("./model"), hub_id("a/b/c")
    (None, None, None)

    Raises:
        ModelError: If ``hf://`` is not followed by a valid name.
    """
    text = str(name)
    if prefix := _WRITTEN_PREFIX.match(text):
        text = text[prefix.end() :]
        if not _HUB_ID.fullmatch(text):
            raise ModelError(
                f"{HUB_PREFIX}{text}: not a valid hub name; write {HUB_PREFIX}user/model or "
                f"{HUB_PREFIX}user/model@revision"
            )
        return text
    is_path = isinstance(name, Path) or looks_like_path(text.partition("@")[0])
    return text if not is_path and _HUB_ID.fullmatch(text) else None


def find_model(name: str | Path, *, revision: str | None = None, token: str | None = None) -> Path:
    """Return the folder of a saved model. A hub model is downloaded unless it is cached.

    Args:
        name: The folder of a model or of a finished run, or the hub name ``user/model`` or
            ``user/model@revision``, with or without ``hf://``.
        revision: Branch, tag or commit on the hub. It overrides the revision in the name.
        token: Access token. None uses the stored login token.

    Raises:
        ModelError: If the folder, repository or revision does not exist, a revision is given for
            a folder, or the hub cannot be reached.
    """
    match = _HUB_ID.fullmatch(hub_id(name) or "")
    if match is not None:
        revision = revision or match["revision"]
        is_explicit = _WRITTEN_PREFIX.match(str(name)) is not None
        failure = "it cannot be downloaded" if is_explicit else "there is no such folder here"
        with _hub_errors(match[0], revision, failure):
            return Path(snapshot_download(match["repo"], revision=revision, token=token))
    if revision is not None:
        raise ModelError(
            f"{name}: revision={revision!r} needs a hub name such as user/model; leave it out for "
            "a folder"
        )
    if not Path(name).exists():
        hint = ""
        if _HUB_ID.fullmatch(str(name)):
            hint = f"; to load a model from the hub, write {HUB_PREFIX}{name}"
        raise ModelError(f"{name}: no such folder; give the folder of a saved model or run{hint}")
    return model_folder(Path(name))


def push(
    folder: Path,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    message: str | None = None,
    token: str | None = None,
) -> str:
    """Upload a saved model in one commit and return its URL. See `Elias.push_to_hub`."""
    if token is None and get_token() is None:
        raise ModelError(f"{repo_id}: pushing needs a token; {_LOG_IN}")
    api = HfApi(token=token)
    with _hub_errors(repo_id, revision, "the model cannot be pushed"):
        api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            revision=revision,
            commit_message=message or "Upload an ELIAS model",
            delete_patterns=_MODEL_FILES,
        )
    return str(commit.repo_url)


@contextmanager
def _hub_errors(name: str, revision: str | None, failure: str) -> Iterator[None]:
    """Convert errors of huggingface_hub to a `ModelError` that says how to fix them."""
    try:
        yield
    except (OSError, errors.HFValidationError) as error:  # base classes of all errors of the hub
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(error, errors.GatedRepoError):
            reason = f"access is restricted; request it on the model's page, then {_LOG_IN}"
        elif isinstance(error, errors.RepositoryNotFoundError):
            reason = f"{failure}, and the hub has no such repository; check the name, and if "
            reason += f"it is private, {_LOG_IN}"
        elif isinstance(error, errors.RevisionNotFoundError):
            reason = f"the repository has no revision {revision!r}; give a branch, tag or commit"
        elif isinstance(error, errors.HFValidationError):
            reason = f"not a valid hub name ({quoted(error)}); give a name such as user/model"
        elif status in (401, 403):
            reason = f"the hub denies access ({status}): the token lacks permission; {_LOG_IN}"
        elif status is not None:
            reason = f"the hub returned HTTP {status} ({quoted(error)}); try again later"
        elif isinstance(error, OSError) and error.filename is not None:  # for example a full disk
            reason = f"{error.filename}: {quoted(error)}; check this folder and the free space"
        else:
            reason = f"{failure}, and the hub cannot be reached or HF_HUB_OFFLINE is set; check "
            reason += "the internet connection, or give the folder of a saved model"
        raise ModelError(f"{name}: {reason}") from error


# --- model card ---

_NO_LICENSE = "# license: choose one before publishing"
_HUB_METRICS = {"P": "precision", "nDCG": "ndcg", "R": "recall"}
"""Names that the hub uses for metrics. Other metrics keep their own names."""

# row titles by path in the metadata; the third key of a path, the split, is left out
_PROBABILITY_ROWS = {
    ("probabilities", "at_threshold", "micro-precision"): "precision at the threshold of best F1",
    ("probabilities", "at_threshold", "micro-recall"): "recall at this threshold",
    ("probabilities", "at_threshold", "micro-F1"): "F1 at this threshold",
    ("probabilities", "at_threshold", "macro-F1"): "F1 at this threshold, mean over labels",
    ("probabilities", "errors", "after"): "calibration error of the best five labels",
}
_DATA_ROWS = {
    ("data", "splits", "points"): "points",
    ("data", "splits", "labels_with_points"): "labels with points",
    ("data", "splits", "labels_per_point"): "labels per point, mean",
    ("data", "splits", "words_mean"): "words per text, mean",
}

_TEMPLATE = Path(__file__).with_name("model_card.md")


def model_card(
    config: ResolvedConfig,
    label_names: Sequence[str],
    metadata: Mapping[str, Any],
    *,
    name: str = "path/to/this/folder",
    license: str | None = None,
) -> str:
    """Return the model card as Markdown with YAML front matter.

    Args:
        config: The configuration.
        label_names: One name for each label.
        metadata: Metadata of the model. ``metrics``, ``probabilities`` and ``data`` each become a
            table. ``source`` names the training data.
        name: Model name in the usage example.
        license: License identifier as used on the hub, such as ``mit``.
    """
    index, encoder, n_labels = config.index, config.encoder, len(label_names)
    parts = "a text encoder and one classifier per\nlabel, all of which are scored (one-vs-all)"
    if index.kind != "all":
        parts = (
            f"a text encoder, an index of {index.n_clusters:,} clusters\n"
            "over the labels that is learned with it, and one classifier per label"
        )
    about, encoder_licence = f"learned word and character n-gram vectors, {encoder.dim} wide", ""
    if encoder.kind != "bag":
        about = (
            f"transformer {_code(encoder.model)}, fine-tuned, {encoder.pooling} pooling, "
            f"texts up to {encoder.max_length * encoder.windows} tokens"
        )
        encoder_licence = f" and of {_code(encoder.model)}"
    packages = [f"- {package} {version(package)}" for package in ("torch", "transformers", "numpy")]
    return _TEMPLATE.read_text(encoding="utf8").format(
        n_labels=n_labels,
        parts=parts,
        examples=", ".join(map(_code, label_names[:5])),
        source=f"\n- Trained on: {_code(str(metadata['source']))}"
        if metadata.get("source")
        else "",
        encoder=about,
        encoder_licence=encoder_licence,
        sections=_sections(metadata),
        versions="\n".join([f"- elias-xmc {elias.__version__}", *packages]),
        name=name,
        license=f"license: {json.dumps(license)}" if license else _NO_LICENSE,
        results=_front_matter(metadata.get("metrics") or {}, n_labels),
    )


def _front_matter(metrics: Mapping[str, Any], n_labels: int) -> str:
    """Return YAML front matter with the test metrics of the last component that was tested."""
    trees = [tree for tree in metrics.values() if isinstance(tree, Mapping)]
    tested = [tree["test"] for tree in trees if isinstance(tree.get("test"), Mapping)]
    values = {path[-1]: value for path, value in numbers(tested[-1])} if tested else {}
    if not values:
        return ""
    types = {name: _HUB_METRICS.get(name.partition("@")[0], name) for name in values}
    results = {
        "task": {"type": "text-classification", "name": "Extreme multi-label classification"},
        "dataset": {"type": "custom", "name": f"{n_labels:,} labels", "split": "test"},
        "metrics": [{"type": types[k], "name": k, "value": value} for k, value in values.items()],
    }
    lines = {
        "metrics": [name for name in _HUB_METRICS.values() if name in types.values()],
        "model-index": [{"name": f"ELIAS model of {n_labels:,} labels", "results": [results]}],
    }
    # JSON is valid YAML, so json.dumps takes care of quoting
    return "".join(f"{k}: {json.dumps(v, ensure_ascii=False)}\n" for k, v in lines.items())


def _sections(metadata: Mapping[str, Any]) -> str:
    """Return the sections of the model card with metrics, probabilities and data statistics."""
    results: dict[str, dict[str, str]] = {}
    for path, value in numbers(metadata.get("metrics") or {}):
        results.setdefault(", ".join(path[:-1]), {})[path[-1]] = f"{value:.2f}"
    tables = {"Results": results}
    for title, names in (("Probabilities", _PROBABILITY_ROWS), ("Data", _DATA_ROWS)):
        rows: dict[str, dict[str, str]] = {name: {} for name in names.values()}
        for path, value in numbers(metadata):
            if len(path) == 4 and (name := names.get((path[0], path[1], path[3]))):
                shown = f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"
                rows[name][path[2]] = shown
        tables[title] = {name: row for name, row in rows.items() if row}
    sections = ""
    for title, rows in tables.items():
        columns = list(dict.fromkeys(column for row in rows.values() for column in row))
        cells = [[name, *(row.get(column, "") for column in columns)] for name, row in rows.items()]
        note = "" if title == "Data" else "In percent.\n\n"
        table = markdown_table(["", *columns], cells)
        sections += f"## {title}\n\n{note}{table}\n" if rows else ""
    return sections


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table. Each cell is written on one line, and its ``|`` are escaped."""
    lines = [header, ["---"] * len(header), *rows]
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def _code(text: str) -> str:
    """Return the text as Markdown inline code on one line."""
    return f"`{' '.join(text.replace('`', chr(39)).split())}`"
