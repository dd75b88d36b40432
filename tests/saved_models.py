"""Save and load a model without the class `Elias`, and change the files of a saved one."""

import json
from types import SimpleNamespace

from safetensors.torch import load_file, save_file

from elias.data.atomic import digest
from elias.persistence.manifest import Manifest, manifest_digest, write_model_manifest
from elias.persistence.model_files import load_model, load_reranker, save_model, save_reranker


def save(folder, model, config, label_names, *, overwrite=False, compact=None, **parts):
    """Save a model and return its folder; ``parts`` are more attributes of `Elias`."""
    empty = dict.fromkeys(("reranker", "first_encoder", "probabilities", "added")) | {"others": ()}
    whole = SimpleNamespace(
        **{"metadata": {}, **empty, **parts},
        model=model,
        config=config,
        label_names=tuple(label_names),
    )
    save_model(whole, folder, overwrite=overwrite, compact=compact)
    return folder


def load(folder, device="cpu"):
    """Return the parts of a saved model as attributes."""
    return load_model(SimpleNamespace, folder, device)


def change_config(folder, **changes):
    """Change entries of the manifest."""
    path = folder / "config.json"
    tree = json.loads(path.read_text(encoding="utf8"))
    tree |= changes
    path.write_text(json.dumps(tree | {"sha256": manifest_digest(tree)}), encoding="utf8")


def change_tensors(path, **changes):
    """Change tensors of a file, ``__`` standing for a dot; None removes a tensor."""
    tensors = load_file(path) | {name.replace("__", "."): value for name, value in changes.items()}
    tensors = {name: value for name, value in tensors.items() if value is not None}
    path.unlink()
    save_file(tensors, path)


def reseal(folder):
    """Correct the checksums of a folder whose files were changed, as an attacker would."""
    path = folder / "config.json"
    tree = json.loads(path.read_text(encoding="utf8"))
    for name, entry in tree["files"].items():
        if (folder / name).is_file():
            entry |= {"size": (folder / name).stat().st_size, "sha256": digest(folder / name)}
    path.write_text(json.dumps(tree | {"sha256": manifest_digest(tree)}), encoding="utf8")


def save_ranker(folder, reranker, *, compact=False):
    """Save a ranker with a manifest of its own, and return the folder."""
    folder.mkdir()
    entry = save_reranker(reranker, folder, compact=compact)
    write_small_manifest(folder, n_labels=reranker.ranker.n_labels, ranker=entry)
    return folder


def write_small_manifest(folder, **entries):
    """Write a manifest of the files of a folder; ``entries`` are those that matter."""
    objects = ("encoder", "ranker", "config", "metadata", "data_settings")
    defaults = {
        **dict.fromkeys(("n_labels", "n_clusters", "n_edges", "alpha", "beta"), 1),
        **dict.fromkeys(("graph_learned", "first_encoder", "probabilities"), False),
        **{name: {} for name in objects},
        "members": 0,
    }
    write_model_manifest(folder, defaults | entries)


def load_ranker(folder):
    return load_reranker(Manifest(folder))


def as_old_format(folder, version=2):
    """Rewrite a saved model as version 0.1 saved it."""
    path = folder / "config.json"
    tree = json.loads(path.read_text(encoding="utf8"))
    del tree["files"], tree["sha256"]
    ranker = tree.pop("ranker")
    parts = {name: tree.pop(name) for name in ("first_encoder", "members", "probabilities")}
    tree |= {"format_version": version, "facts": tree.pop("metadata")}
    tree["facts"]["data_settings"] = tree.pop("data_settings")
    if version == 2:
        tree["beside"] = {"ranker": bool(ranker), **parts}
    if ranker:
        about = {"format_version": version, "elias_version": "0.1.0"}
        text = json.dumps(about | ranker)
        (folder / "ranker" / "ranker.json").write_text(text, encoding="utf8")
    if (folder / "labels.tsv").exists():
        lines = (folder / "labels.tsv").read_bytes().split(b"\n", 1)
        (folder / "labels.txt").write_bytes(lines[1])
        (folder / "labels.tsv").unlink()
    path.write_text(json.dumps(tree), encoding="utf8")
