"""Save all parts of a model to a folder, and load them again."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from elias.config import EliasConfig, EncoderConfig, ResolvedConfig, fill_sizes
from elias.errors import DATA_SETTINGS, ConfigError, broken, quoted
from elias.model.elias import EliasModel, LinearRows
from elias.model.encoder import BagEncoder, TextEncoder
from elias.model.graph import LabelGraph
from elias.model.one_vs_all import OneVsAll
from elias.persistence.card import model_card
from elias.persistence.labels_file import (
    LabelTable,
    read_labels,
    read_names,
    write_labels,
    write_names,
)
from elias.persistence.manifest import (
    CARD_FILE,
    CONFIG_FILE,
    ENCODER_FOLDER,
    FIRST_ENCODER_FOLDER,
    LABELS_FILE,
    MEMBERS_FOLDER,
    OLD_LABELS_FILE,
    PROBABILITIES_FILE,
    VOCABULARY_FILE,
    WEIGHTS_FILE,
    Expected,
    Manifest,
    as_json,
    check_values,
    dtype_name,
    read_json,
    staged_model,
    write_manifest,
    write_tensors,
)
from elias.persistence.reranker_files import load_reranker, save_reranker
from elias.rerank.probabilities import Probabilities
from elias.text.vectorizer import Featurizer

if TYPE_CHECKING:
    from elias.inference.predictor import Elias

T = TypeVar("T")

_EDGE_LABELS = "graph.edge_labels"
_LABEL_WEIGHT = "labels.weight"
_REMOVED = "graph.removed_log"
"""Only in models whose edges were pruned."""
_IDF = "vocabulary.idf"
"""Inverse document frequencies of the bag encoder."""
_STORED_DTYPES = {_EDGE_LABELS: "int32|int64", _LABEL_WEIGHT: "float32|bfloat16"}
"""Dtypes of tensors that are converted when they are loaded."""
_LOWER_RATES = "lower the learning rates (stages.NAME.*_lr) and train again"


def save_model(elias: Elias, folder: str | Path, *, overwrite: bool = False) -> None:
    """Save a model with its ranker, members and probabilities.

    Args:
        elias: The model.
        folder: A folder that does not exist or is empty; it appears only when it is complete.
        overwrite: Replace a saved model in ``folder``.

    Raises:
        ModelError: If the folder exists, cannot be written, or a weight is not finite.
    """
    with staged_model(Path(folder), overwrite=overwrite) as staging:
        _write(elias, staging)


def _write(elias: Elias, folder: Path) -> None:
    model = elias.model
    assert len(elias.label_names) == model.n_labels, "every label has a name"
    encoder, tensors = _save_encoder(model.encoder, folder)
    tensors |= {name: _as_stored(tensor) for name, tensor in model.state_dict().items()}
    tensors[_EDGE_LABELS] = tensors[_EDGE_LABELS].to(torch.int32)
    if elias.config.index.label_storage == "compact":  # exact: it was trained in bfloat16
        tensors[_LABEL_WEIGHT] = tensors[_LABEL_WEIGHT].to(torch.bfloat16)
    write_tensors(folder / WEIGHTS_FILE, tensors, _LOWER_RATES)
    write_labels(folder / LABELS_FILE, LabelTable(elias.label_names))
    if elias.first_encoder is not None:
        first = folder / FIRST_ENCODER_FOLDER
        first.mkdir()
        _save_encoder(elias.first_encoder, first)
        state = elias.first_encoder.state_dict()
        tensors = {name: _as_stored(tensor) for name, tensor in state.items()}
        write_tensors(first / WEIGHTS_FILE, tensors, _LOWER_RATES)
    if elias.probabilities is not None:
        text = json.dumps({"format_version": 1, **elias.probabilities.to_dict()}, allow_nan=False)
        (folder / PROBABILITIES_FILE).write_text(text + "\n", encoding="utf8")
    for number, member in enumerate(elias.others, start=1):
        path = folder / MEMBERS_FOLDER / str(number)
        path.mkdir(parents=True)
        _write(member, path)
    metadata = as_json(elias.metadata)
    entries = {
        "n_labels": model.n_labels,
        "n_clusters": model.graph.n_clusters,
        "n_edges": model.graph.edge_labels.shape[1],
        "graph_learned": model.graph.learned,
        "alpha": model.alpha,
        "beta": model.graph.beta,
        "encoder": encoder,
        "ranker": {} if elias.reranker is None else save_reranker(elias.reranker, folder),
        "first_encoder": elias.first_encoder is not None,
        "members": len(elias.others),
        "probabilities": elias.probabilities is not None,
        "config": elias.config.to_dict(),
        "data_settings": metadata.pop(DATA_SETTINGS, {}),
        "metadata": metadata,
    }
    card = model_card(elias.config, elias.label_names, elias.metadata)
    (folder / CARD_FILE).write_bytes(card.encode("utf8", "replace"))
    write_manifest(folder, entries)


def load_model(
    build: Callable[..., T],
    folder: str | Path,
    device: torch.device | str = "cpu",
    share: Callable[[LinearRows], LinearRows] | None = None,
) -> T:
    """Load a saved model with its ranker, members and probabilities, ready to predict.

    Args:
        build: Called with the parts as keyword arguments: `Elias`.
        folder: The folder of a saved model.
        device: Where the tensors go.
        share: Returns the rows of W_L that this process holds; None: all rows.

    Raises:
        ModelError: If anything is missing, damaged, foreign, or of a newer format.
    """
    manifest = Manifest(Path(folder))
    n_labels = manifest["n_labels"]
    try:
        # sizes that older versions did not save only matter to training
        config = fill_sizes(EliasConfig.from_dict(manifest["config"]), 0, n_labels)
    except ConfigError as error:
        raise broken(
            manifest.path, f"config does not fit this version of elias-xmc ({error})"
        ) from error
    if manifest.is_old:
        label_names: Sequence[str] = read_names(manifest.file(OLD_LABELS_FILE), n_labels)
    else:
        label_names = read_labels(manifest.file(LABELS_FILE), n_labels).names
    model = _load_weights(manifest, config, share).to(torch.device(device)).eval()
    first_encoder = probabilities = None
    if manifest["first_encoder"]:
        first_encoder = _load_first_encoder(manifest, config.encoder).to(torch.device(device))
    if manifest["probabilities"]:
        path = manifest.file(PROBABILITIES_FILE)
        probabilities = Probabilities.from_dict(read_json(path, newest=1), path)
    members = []
    for number in range(1, manifest["members"] + 1):
        path = manifest.file(f"{MEMBERS_FOLDER}/{number}/{CONFIG_FILE}").parent
        member: Any = load_model(build, path, device, share)
        if member.label_names != label_names:
            raise broken(path, "its labels are not those of the first member")
        members.append(member)
    return build(
        model=model,
        config=config,
        label_names=label_names,
        metadata=manifest["metadata"] | {DATA_SETTINGS: manifest["data_settings"]},
        reranker=load_reranker(manifest) if manifest["ranker"] else None,
        first_encoder=first_encoder,
        others=members,
        probabilities=probabilities,
    )


def _load_weights(
    manifest: Manifest, config: ResolvedConfig, share: Callable[[LinearRows], LinearRows] | None
) -> EliasModel:
    tensors = manifest.tensors(WEIGHTS_FILE)
    idf = {name: tensors.pop(name) for name in (_IDF,) if name in tensors}
    try:
        encoder = _rebuild_encoder(manifest, config.encoder, idf)
        # shapes without numbers: the saved tensors take their place, and nothing is drawn at random
        with torch.device("meta"):
            model = _empty_model(manifest, config, encoder, pruned=_REMOVED in tensors)
    except (RuntimeError, OverflowError, TypeError, MemoryError) as error:
        raise broken(manifest.path, f"its sizes make no model ({quoted(error)})") from error
    manifest.check_tensors(WEIGHTS_FILE, tensors, _expected(model))
    edges = tensors[_EDGE_LABELS] = tensors[_EDGE_LABELS].to(torch.int64)
    if edges.min() < 0 or edges.max() > model.n_labels:
        raise broken(
            manifest.folder / WEIGHTS_FILE,
            f"{_EDGE_LABELS} has a label outside 0..{model.n_labels}",
        )
    if share is None:
        tensors[_LABEL_WEIGHT] = tensors[_LABEL_WEIGHT].to(torch.float32)
    model.load_state_dict(tensors, assign=True)
    if share is not None:
        model.labels = share(model.labels)
    return model


def _empty_model(
    manifest: Manifest, config: ResolvedConfig, encoder: TextEncoder, *, pruned: bool
) -> EliasModel:
    n_labels, n_clusters = manifest["n_labels"], manifest["n_clusters"]
    if config.index.kind == "all":
        return OneVsAll(encoder, n_labels)
    edges = (n_clusters, manifest["n_edges"])
    graph = LabelGraph(
        torch.empty(edges, dtype=torch.int64),
        n_labels,
        manifest["beta"],
        edge_logits=torch.empty(edges) if manifest["graph_learned"] else None,
        removed_log=torch.empty(n_clusters) if pruned else None,
    )
    return EliasModel(encoder, graph, manifest["alpha"])


def _load_first_encoder(manifest: Manifest, config: EncoderConfig) -> TextEncoder:
    name = f"{FIRST_ENCODER_FOLDER}/{WEIGHTS_FILE}"
    encoder = _rebuild_transformer(manifest, config, f"{FIRST_ENCODER_FOLDER}/{ENCODER_FOLDER}")
    tensors = manifest.tensors(name)
    manifest.check_tensors(name, tensors, _expected(encoder))
    encoder.load_state_dict(tensors, assign=True)
    return encoder.eval()


def _save_encoder(encoder: TextEncoder, folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Write the files of an encoder; return its manifest entry and tensors beside its own."""
    if not isinstance(encoder, BagEncoder):
        from elias.model.transformer import TransformerEncoder  # slow to import

        assert isinstance(encoder, TransformerEncoder), "no other kind is known"
        encoder.save(folder / ENCODER_FOLDER)
        return {"kind": "transformer"}, {}
    featurizer = encoder.featurizer
    if featurizer is None:
        return {"kind": "features", "n_features": len(encoder.vectors)}, {}
    write_names(folder / VOCABULARY_FILE, [*featurizer.words, *featurizer.ngrams])
    entry = {
        "kind": "bag",
        "n_words": len(featurizer.words),
        "n_ngrams": len(featurizer.ngrams),
        "char_ngrams": list(featurizer.char_ngrams),
    }
    return entry, {_IDF: torch.from_numpy(featurizer.idf)}


def _rebuild_encoder(
    manifest: Manifest, config: EncoderConfig, idf: Mapping[str, Tensor]
) -> TextEncoder:
    """Return the encoder of a model without its weights."""
    entry, kind = manifest["encoder"], manifest["encoder"].get("kind")
    if kind == "transformer":
        return _rebuild_transformer(manifest, config, ENCODER_FOLDER)
    if kind == "features":
        check_values(manifest.path, entry, {"n_features": (int, 0)}, "encoder.")
        with torch.device("meta"):
            return BagEncoder(config, None, entry["n_features"])
    if kind != "bag":
        raise broken(manifest.path, f"encoder.kind is {kind!r}, which is not known")
    check_values(
        manifest.path,
        entry,
        {"n_words": (int, 0), "n_ngrams": (int, 0), "char_ngrams": (list, None)},
        "encoder.",
    )
    n_words, n_features = entry["n_words"], entry["n_words"] + entry["n_ngrams"]
    span = entry["char_ngrams"]
    if [type(size) for size in span] != [int, int]:
        raise broken(manifest.path, f"encoder.char_ngrams is {span!r}, not two whole numbers")
    manifest.check_tensors(WEIGHTS_FILE, idf, {_IDF: ("float32", (n_features,))})
    names = read_names(manifest.file(VOCABULARY_FILE), n_features)
    featurizer = Featurizer(
        words=names[:n_words],
        ngrams=names[n_words:],
        idf=idf[_IDF].numpy(),
        char_ngrams=(span[0], span[1]),
    )
    with torch.device("meta"):
        return BagEncoder(config, featurizer, n_features)


def _rebuild_transformer(manifest: Manifest, config: EncoderConfig, folder: str) -> TextEncoder:
    from elias.model.transformer import SAVED_FILES, TransformerEncoder  # slow to import

    for name in SAVED_FILES:
        manifest.file(f"{folder}/{name}")
    return TransformerEncoder.from_saved(config, manifest.folder / folder)


def _expected(module: nn.Module) -> Expected:
    """Return dtypes and shapes of a module's saved tensors."""
    return {
        name: (_STORED_DTYPES.get(name, dtype_name(tensor)), tuple(tensor.shape))
        for name, tensor in module.state_dict().items()
    }


def _as_stored(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu()
    return tensor.to(torch.float32) if tensor.is_floating_point() else tensor
