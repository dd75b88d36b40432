"""Save all parts of a model to a folder, and load them again.

The parts are the weights, the labels, the encoder, the ranker, the members of an ensemble and the
fitted probabilities. `elias.persistence.manifest` describes and checks their files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import numpy as np
import torch
from safetensors import SafetensorError
from scipy.sparse import csr_matrix
from torch import Tensor, nn

from elias.config import EliasConfig, ResolvedConfig, ResolvedEncoder, complete_tree, fill_sizes
from elias.data.atomic import staged_folder
from elias.data.splits import DATA_SETTINGS
from elias.errors import ConfigError, DataError, ModelError, damaged_file, quoted
from elias.labels import LabelTable
from elias.model.elias import EliasModel, LinearRows
from elias.model.encoder import BagEncoder, TextEncoder
from elias.model.graph import LabelGraph
from elias.model.one_vs_all import OneVsAll
from elias.persistence import manifest as files
from elias.persistence.hub import model_card
from elias.rerank import calibration as trees
from elias.rerank.added_labels import ARRAYS, AddedLabels
from elias.rerank.probabilities import Probabilities
from elias.rerank.reranker import Reranker
from elias.rerank.sparse_ranker import RankerFeatures, SparseRanker, Transform
from elias.text.vectorizer import Featurizer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from elias.inference.predictor import Elias

T = TypeVar("T")

_EDGE_LABELS = "graph.edge_labels"
_LABEL_WEIGHT = "labels.weight"
_REMOVED = "graph.removed_log"
"""Name of a tensor that only models with pruned edges have."""
_IDF = "vocabulary.idf"
"""Name of the tensor of inverse document frequencies of the bag encoder."""
_STORED_DTYPES = {_EDGE_LABELS: "int32|int64", _LABEL_WEIGHT: "float32|bfloat16"}
"""Dtypes allowed for tensors that are converted when they are loaded."""
_ENCODER_ENTRIES: dict[str, files.Entries] = {
    "transformer": {},
    "features": {"n_features": (int, 0)},
    "bag": {"n_words": (int, 0), "n_ngrams": (int, 0), "char_ngrams": (list, None)},
}
"""Manifest entries of each kind of encoder."""
_RANKER_ENTRIES: files.Entries = {
    **dict.fromkeys(("n_labels", "n_features", "n_dense", "n_words", "word_ngrams"), (int, 0)),
    "n_proposed": (int, 0),
    **dict.fromkeys(("reads_text", "calibrated", "named"), (bool, None)),
    **dict.fromkeys(("transform", "mixture"), (str, None)),
    "char_ngrams": (list, None),
    "sharpness": (float, 1e-9),
}
_BY_FEATURE = "by_feature"
"""Key of the entry that is true if the ranker's weights are stored by feature, not by label."""
_BLOCK = 2**16
"""Columns per block of a compact ranker, so that column indices fit in 16 bits."""
_LEVELS = "levels"
"""Key of the entry that is true if a compact ranker has weights in 8 bits, not in float16."""
_N_LEVELS = 127
"""Number of positive levels to which 8-bit weights are rounded."""
_LEVEL_RANGE = 1000
"""Maximum ratio of the highest to the lowest positive level."""
_MAX_NGRAM = 100
"""Longest n-gram of words or characters in a saved model."""
_CALIBRATIONS = (
    ("calibration", "calibrated", trees.N_TREE_FEATURES),
    ("by_name", "named", trees.N_TREE_FEATURES + trees.N_NAME_FEATURES),
)
"""For each calibration: attribute of `Reranker`, manifest entry and number of features."""


def save_model(
    elias: Elias, folder: str | Path, *, compact: bool | None = None, overwrite: bool = False
) -> None:
    """Save a model with its ranker, ensemble members and fitted probabilities.

    Args:
        elias: The model.
        folder: A new or empty folder. It appears only when all files are complete.
        compact: Store weights in 8 bits. None does this only if the model was loaded from a folder
            saved with ``compact``.
        overwrite: Replace the model that is saved in ``folder``.

    Raises:
        ModelError: If the folder exists or cannot be written, or a weight is not finite.
    """
    folder = Path(folder)
    if compact is None:
        compact = bool(elias.metadata.get(files.COMPACT))
    is_model = all((folder / name).is_file() for name in (files.CONFIG_FILE, files.WEIGHTS_FILE))
    if overwrite and folder.is_dir() and any(folder.iterdir()) and not is_model:
        raise ModelError(
            f"{folder}: has no saved model, so it is not overwritten; choose another folder"
        )
    try:
        with staged_folder(folder, overwrite=overwrite) as staging:
            _write(elias, staging, compact=compact)
    except DataError as error:
        raise ModelError(str(error)) from error
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{folder}: cannot be written: {quoted(error)}; fix this, or choose another folder"
        ) from error


def _write(elias: Elias, folder: Path, *, compact: bool) -> None:
    model, first_encoder = elias.model, elias.first_encoder
    encoder, tensors = _save_encoder(model.encoder, folder)
    tensors |= _stored_tensors(model)
    tensors[_EDGE_LABELS] = tensors[_EDGE_LABELS].to(torch.int32)
    if elias.config.index.label_storage == "compact":  # no loss: it was trained in bfloat16
        tensors[_LABEL_WEIGHT] = tensors[_LABEL_WEIGHT].to(torch.bfloat16)
    remedy = "lower the learning rates (stages.NAME.*_lr) and train again"
    files.write_tensors(folder / files.WEIGHTS_FILE, tensors, remedy, compact=compact)
    files.write_labels(folder / files.LABELS_FILE, elias.label_names)
    if first_encoder is not None:
        (folder / files.FIRST_ENCODER).mkdir()
        _save_encoder(first_encoder, folder / files.FIRST_ENCODER)
        path = folder / files.FIRST_ENCODER / files.WEIGHTS_FILE
        files.write_tensors(path, _stored_tensors(first_encoder), remedy, compact=compact)
    if elias.probabilities is not None:
        text = json.dumps({"format_version": 1, **elias.probabilities.to_dict()}, allow_nan=False)
        (folder / files.PROBABILITIES_FILE).write_text(text + "\n", encoding="utf8")
    for number, member in enumerate(elias.others, start=1):
        path = folder / files.MEMBERS_FOLDER / str(number)
        path.mkdir(parents=True)
        _write(member, path, compact=compact)
    if elias.added is not None:
        tensors = dict(zip(ARRAYS, map(torch.from_numpy, elias.added.arrays), strict=True))
        files.write_tensors(folder / files.ADDED_FILE, tensors, "check the texts of added labels")
    ranker = {}
    if elias.reranker is not None:
        ranker = save_reranker(elias.reranker, folder, compact=compact)
    card = model_card(elias.config, elias.label_names, elias.metadata)
    (folder / files.CARD_FILE).write_bytes(card.encode("utf8", "replace"))
    metadata = files.as_json(elias.metadata)
    metadata.pop(files.COMPACT, None)
    if compact:
        metadata[files.COMPACT] = True
    entries = {
        "n_labels": model.n_labels,
        "n_added": len(elias.label_names) - model.n_labels,
        "n_clusters": model.graph.n_clusters,
        "n_edges": model.graph.edge_labels.shape[1],
        "graph_learned": model.graph.learned,
        "alpha": model.alpha,
        "beta": model.graph.beta,
        "encoder": encoder,
        "ranker": ranker,
        "first_encoder": first_encoder is not None,
        "members": len(elias.others),
        "probabilities": elias.probabilities is not None,
        "config": elias.config.to_dict(),
        "data_settings": metadata.pop(DATA_SETTINGS, {}),
        "metadata": metadata,
    }
    files.write_model_manifest(folder, entries)


def load_model(
    build: Callable[..., T],
    folder: Path,
    device: torch.device | str = "cpu",
    share: Callable[[LinearRows], LinearRows] | None = None,
) -> T:
    """Load a saved model with its ranker, ensemble members and fitted probabilities.

    Args:
        build: Constructor that takes the parts as keyword arguments (the class `Elias`).
        folder: The folder of a saved model.
        device: Device to load the tensors to.
        share: Function that selects the rows of W_L for this process. None loads all rows.

    Raises:
        ModelError: If a file is missing, damaged, not saved by ELIAS, or of a newer format.
    """
    manifest = files.Manifest(folder)
    n_labels, n_all = manifest["n_labels"], manifest["n_labels"] + manifest["n_added"]
    try:
        # older versions did not save all sizes; the missing sizes matter only for training
        tree = complete_tree(manifest["config"], drop_removed=True)
        config = fill_sizes(EliasConfig.from_dict(tree), 0, n_labels)
    except ConfigError as error:
        reason = f"config is not valid in this version of elias-xmc ({error})"
        raise damaged_file(manifest.path, reason) from error
    if manifest.is_old:
        label_names: Any = files.read_names(manifest.file(files.OLD_LABELS_FILE), n_labels)
    else:
        label_names = files.read_labels(manifest.file(files.LABELS_FILE), n_all)
    model = _load_weights(manifest, config, share).to(device).eval()
    first_encoder = probabilities = None
    if manifest["first_encoder"]:
        name = f"{files.FIRST_ENCODER}/{files.WEIGHTS_FILE}"
        first_encoder = _load_transformer(manifest, config.encoder, f"{files.FIRST_ENCODER}/")
        tensors = manifest.tensors(name)
        manifest.check_tensors(name, tensors, _expected(first_encoder))
        first_encoder.load_state_dict(tensors, assign=True)
        first_encoder.to(device).eval()
    if manifest["probabilities"]:
        path = manifest.file(files.PROBABILITIES_FILE)
        probabilities = Probabilities.from_dict(files.read_json(path, newest=1), path)
    members = []
    for number in range(1, manifest["members"] + 1):
        path = manifest.file(f"{files.MEMBERS_FOLDER}/{number}/{files.CONFIG_FILE}").parent
        member: Any = load_model(build, path, device, share)
        if member.label_names != label_names:
            raise damaged_file(path, "its labels differ from those of the first member")
        members.append(member)
    reranker = load_reranker(manifest) if manifest["ranker"] else None
    added = None
    if files.ADDED_FILE in manifest["files"]:
        added = _load_added(manifest, n_all, model.encoder.dim)
        added = added.named(LabelTable.of(label_names), model, reranker)
    elif manifest["n_added"]:
        raise damaged_file(manifest.path, f"there is no {files.ADDED_FILE} for the added labels")
    return build(
        model=model,
        config=config,
        label_names=label_names,
        metadata=manifest["metadata"] | {DATA_SETTINGS: manifest["data_settings"]},
        reranker=reranker,
        added=added,
        first_encoder=first_encoder,
        others=members,
        probabilities=probabilities,
    )


def _load_weights(
    manifest: files.Manifest,
    config: ResolvedConfig,
    share: Callable[[LinearRows], LinearRows] | None,
) -> EliasModel:
    tensors = manifest.tensors(files.WEIGHTS_FILE)
    n_labels, n_clusters = manifest["n_labels"], manifest["n_clusters"]
    model: EliasModel
    try:
        encoder = _load_encoder(manifest, config.encoder, tensors)
        # meta tensors need no memory or initialisation; the saved tensors replace them
        with torch.device("meta"):
            if config.index.kind == "all":
                model = OneVsAll(encoder, n_labels)
            else:
                edges = torch.empty((n_clusters, manifest["n_edges"]), dtype=torch.int64)
                graph = LabelGraph(
                    edges,
                    n_labels,
                    manifest["beta"],
                    edge_logits=edges.float() if manifest["graph_learned"] else None,
                    removed_log=torch.empty(n_clusters) if _REMOVED in tensors else None,
                )
                model = EliasModel(encoder, graph, manifest["alpha"])
    except (RuntimeError, OverflowError, TypeError, MemoryError) as error:
        raise damaged_file(manifest.path, f"the sizes are invalid ({quoted(error)})") from error
    manifest.check_tensors(files.WEIGHTS_FILE, tensors, _expected(model))
    tensors[_EDGE_LABELS] = tensors[_EDGE_LABELS].to(torch.int64)
    lowest, highest = tensors[_EDGE_LABELS].aminmax()
    if lowest < 0 or highest > n_labels:
        reason = f"{_EDGE_LABELS} has a label id outside 0..{n_labels}"
        raise damaged_file(manifest.folder / files.WEIGHTS_FILE, reason)
    if share is None:
        tensors[_LABEL_WEIGHT] = tensors[_LABEL_WEIGHT].to(torch.float32)
    model.load_state_dict(tensors, assign=True)
    if share is not None:
        model.labels = share(model.labels)
    return model


def _load_added(manifest: files.Manifest, n_labels: int, dim: int) -> AddedLabels:
    tensors = manifest.tensors(files.ADDED_FILE)
    n_rows = len(tensors.get("labels", ()))
    tensors.setdefault("offset", torch.zeros(n_rows))  # older models have no offset
    expected: files.Expected = {
        "labels": ("int64", (None,)),
        "vectors": ("float32", (n_rows, dim)),
        "background": ("float32", (n_rows, 2)),
        "n_examples": ("int64", (n_rows,)),
        "offset": ("float32", (n_rows,)),
    }
    manifest.check_tensors(files.ADDED_FILE, tensors, expected)
    labels = tensors["labels"]
    missing = set(range(manifest["n_labels"], n_labels)) - set(labels.tolist())
    is_valid = len(labels) > 0 and labels.min() >= 0 and labels.max() < n_labels
    if missing or not is_valid or (tensors["background"][:, 1] <= 0).any():
        raise damaged_file(
            manifest.folder / files.ADDED_FILE, "does not fit the labels of the model"
        )
    return AddedLabels.of(tensors[name].numpy() for name in ARRAYS)


def _expected(module: nn.Module) -> files.Expected:
    """Return the expected dtype and shape of each saved tensor of a module."""
    return {
        name: (_STORED_DTYPES.get(name, files.dtype_name(tensor)), tuple(tensor.shape))
        for name, tensor in module.state_dict().items()
    }


def _stored_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a module on the CPU, with floating-point tensors as float32."""
    return {
        name: tensor.cpu().to(torch.float32) if tensor.is_floating_point() else tensor.cpu()
        for name, tensor in module.state_dict().items()
    }


# --- encoder ---


def _save_encoder(encoder: TextEncoder, folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Write the files of an encoder. Return its manifest entry and additional tensors."""
    if not isinstance(encoder, BagEncoder):
        from elias.model.transformer import TransformerEncoder  # slow to import

        assert isinstance(encoder, TransformerEncoder), "unknown kind of encoder"
        encoder.save(folder / files.ENCODER_FOLDER)
        return {"kind": "transformer"}, {}
    if encoder.featurizer is None:
        return {"kind": "features", "n_features": len(encoder.vectors)}, {}
    entry = {"kind": "bag", **_save_featurizer(encoder.featurizer, folder)}
    return entry, {_IDF: torch.from_numpy(encoder.featurizer.idf)}


def _load_encoder(
    manifest: files.Manifest, config: ResolvedEncoder, tensors: dict[str, Tensor]
) -> TextEncoder:
    """Build the encoder of a model without loading weights. Remove the idf from ``tensors``."""
    entry = manifest["encoder"]
    kind = entry.get("kind")
    if kind not in _ENCODER_ENTRIES:
        raise damaged_file(manifest.path, f"encoder.kind is {kind!r}, which is unknown")
    files.check_values(manifest.path, entry, _ENCODER_ENTRIES[kind], "encoder.")
    if kind == "transformer":
        return _load_transformer(manifest, config)
    featurizer = None
    if kind == "features":
        n_features = entry["n_features"]
    else:
        n_features = entry["n_words"] + entry["n_ngrams"]
        idf = {name: tensors.pop(name) for name in (_IDF,) if name in tensors}
        manifest.check_tensors(files.WEIGHTS_FILE, idf, {_IDF: ("float32", (n_features,))})
        featurizer = _load_featurizer(manifest, entry, files.VOCABULARY_FILE, idf[_IDF].numpy())
    with torch.device("meta"):
        return BagEncoder(config, featurizer, n_features)


def _load_transformer(
    manifest: files.Manifest, config: ResolvedEncoder, parent: str = ""
) -> TextEncoder:
    from elias.model.transformer import SAVED_FILES, TransformerEncoder  # slow to import

    for name in SAVED_FILES:
        path = manifest.file(f"{parent}{files.ENCODER_FOLDER}/{name}")
    return TransformerEncoder.from_saved(config, path.parent)


def _save_featurizer(featurizer: Featurizer, folder: Path) -> dict[str, Any]:
    files.write_names(folder / files.VOCABULARY_FILE, [*featurizer.words, *featurizer.ngrams])
    return {
        "n_words": len(featurizer.words),
        "n_ngrams": len(featurizer.ngrams),
        "word_ngrams": featurizer.word_ngrams,
        "char_ngrams": list(featurizer.char_ngrams),
    }


def _load_featurizer(
    manifest: files.Manifest, entry: Mapping[str, Any], vocabulary: str, idf: NDArray[np.float32]
) -> Featurizer:
    span, n_words = entry["char_ngrams"], entry["n_words"]
    if [type(size) for size in span] != [int, int] or not 0 <= span[0] <= span[1] <= _MAX_NGRAM:
        raise damaged_file(manifest.path, f"char_ngrams is {span!r:.80}, not two lengths")
    terms = files.read_names(manifest.file(vocabulary), len(idf))
    word_ngrams = entry.get("word_ngrams", 1)  # missing for encoders of format 2
    if type(word_ngrams) is not int or not 0 <= word_ngrams <= _MAX_NGRAM:
        raise damaged_file(manifest.path, f"word_ngrams is {word_ngrams!r:.80}, not a length")
    return Featurizer(terms[:n_words], terms[n_words:], idf, (span[0], span[1]), word_ngrams)


# --- ranker ---


def save_reranker(reranker: Reranker, folder: Path, *, compact: bool = False) -> dict[str, Any]:
    """Write the files of a ranker to a subfolder of the model. Return its manifest entry."""
    ranker, featurizer = reranker.ranker, reranker.features.featurizer
    (folder / files.RANKER_FOLDER).mkdir()
    arrays: dict[str, NDArray[Any]] = {
        **_sparse_arrays("weights", ranker.weights, compact=compact),
        **_sparse_arrays("dense_weights", ranker.dense_weights, compact=compact),
        "biases": ranker.biases,
        "frequencies": reranker.frequencies,
    }
    vocabulary: dict[str, Any] = {"n_words": 0, "word_ngrams": 0, "char_ngrams": [0, 0]}
    if featurizer is not None:
        arrays["idf"] = featurizer.idf
        vocabulary = _save_featurizer(featurizer, folder / files.RANKER_FOLDER)
    for attribute, _, _ in _CALIBRATIONS:
        if (calibration := getattr(reranker, attribute)) is not None:
            parts = calibration.to_arrays()
            arrays |= {f"{attribute}.{name}": array for name, array in parts.items()}
    if reranker.names is not None:
        arrays |= {"names.starts": reranker.names.starts, "names.columns": reranker.names.columns}
    tensors = {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in arrays.items()}
    remedy = "check the input features, or lower rerank.cost"
    files.write_tensors(folder / files.RANKER_WEIGHTS_FILE, tensors, remedy)
    return {
        "n_labels": ranker.n_labels,
        "n_features": reranker.features.n_features,
        "n_dense": ranker.n_dense,
        _BY_FEATURE: True,
        "reads_text": featurizer is not None,
        **vocabulary,
        "calibrated": reranker.calibration is not None,
        "named": reranker.by_name is not None,
        "n_proposed": reranker.n_proposed,
        "transform": reranker.transform,
        "mixture": reranker.mixture,
        "sharpness": float(reranker.sharpness),
        files.COMPACT: compact,
        _LEVELS: compact,
    }


def load_reranker(manifest: files.Manifest) -> Reranker:
    """Load the ranker of a saved model.

    Raises:
        ModelError: If a file is missing or damaged, or the ranker does not fit the model.
    """
    entry = {"n_proposed": 0} | manifest["ranker"]  # earlier versions do not write it
    path = manifest.folder / files.RANKER_WEIGHTS_FILE
    files.check_values(manifest.path, entry, _RANKER_ENTRIES, "ranker.")
    n_labels, n_features, n_dense = (entry[f"n_{key}"] for key in ("labels", "features", "dense"))
    for key, allowed in (
        ("transform", get_args(Transform)),
        ("mixture", get_args(trees.Mixture)),
        ("n_labels", [manifest["n_labels"]]),
        ("named", [False, entry["calibrated"] and entry["reads_text"]]),
    ):
        if entry[key] not in allowed:
            choices = " or ".join(map(repr, allowed))
            raise damaged_file(manifest.path, f"ranker.{key} is {entry[key]!r}, not {choices}")
    tensors = manifest.tensors(files.RANKER_WEIGHTS_FILE)
    manifest.check_tensors(files.RANKER_WEIGHTS_FILE, tensors, _expected_of_ranker(entry))
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    weights = {
        name: _load_sparse(path, name, arrays, shape, compact=bool(entry.get(files.COMPACT)))
        for name, shape in _weight_shapes(entry).items()
    }
    if entry.get(_BY_FEATURE):
        ranker = SparseRanker(**weights, biases=arrays["biases"])
    else:
        ranker = SparseRanker.from_label_rows(weights["weights"], arrays["biases"], n_dense)
    if (arrays["frequencies"] < 0).any():
        raise damaged_file(path, "frequencies contains a negative count")
    featurizer = names = None
    if entry["reads_text"]:
        vocabulary = f"{files.RANKER_FOLDER}/{files.VOCABULARY_FILE}"
        featurizer = _load_featurizer(manifest, entry, vocabulary, arrays["idf"])
    if entry["named"]:
        _csr(path, "names", arrays, (n_labels, n_features))
        names = trees.LabelNames(arrays["names.starts"], arrays["names.columns"], arrays["idf"])
    calibrations: dict[str, trees.Calibration] = {}
    for attribute, flag, n_inputs in _CALIBRATIONS:
        if entry[flag]:
            parts = {name: arrays[f"{attribute}.{name}"] for name in trees.TREE_DTYPES}
            calibration = trees.Calibration.from_arrays(parts, n_inputs)
            if calibration is None:
                raise damaged_file(path, f"the arrays of {attribute} are not valid decision trees")
            calibrations[attribute] = calibration
    return Reranker(
        features=RankerFeatures(n_features, featurizer),
        ranker=ranker,
        frequencies=arrays["frequencies"],
        transform=entry["transform"],
        mixture=entry["mixture"],
        sharpness=entry["sharpness"],
        names=names,
        calibration=calibrations.get("calibration"),
        by_name=calibrations.get("by_name"),
        n_proposed=entry["n_proposed"],
    )


def _expected_of_ranker(entry: Mapping[str, Any]) -> files.Expected:
    """Return the expected dtype and shape of each array, given the ranker's manifest entry."""
    n_labels = entry["n_labels"]
    compact = entry.get(files.COMPACT)
    expected: dict[str, tuple[str, tuple[int | None, ...]]] = {
        "biases": ("float32", (n_labels,)),
        "frequencies": ("int64", (n_labels,)),
    }
    for name, (n_rows, n_columns) in _weight_shapes(entry).items():
        n_rows *= _n_blocks(n_columns) if compact else 1
        dtype = "float16" if compact else "float32"
        if entry.get(_LEVELS):
            dtype = "int8"
            expected[f"{name}.levels"] = ("float32", (_N_LEVELS + 1,))
        expected[f"{name}.values"] = (dtype, (None,))
        expected[f"{name}.columns"] = ("uint16" if compact else "int32", (None,))
        expected[f"{name}.starts"] = ("int64", (n_rows + 1,))
    if entry["reads_text"]:
        expected["idf"] = ("float32", (entry["n_features"],))
    for attribute, flag, _ in _CALIBRATIONS:
        if entry[flag]:
            for name, kind in trees.TREE_DTYPES.items():
                expected[f"{attribute}.{name}"] = (np.dtype(kind).name, (None,))
    if entry["named"]:
        expected["names.starts"] = ("int64", (n_labels + 1,))
        expected["names.columns"] = ("uint32", (None,))
    return expected


def _csr(
    path: Path, name: str, arrays: Mapping[str, NDArray[Any]], shape: tuple[int, int]
) -> csr_matrix:
    """Build a CSR matrix from saved arrays after checking that they are consistent."""
    starts, columns = arrays[f"{name}.starts"], arrays[f"{name}.columns"]
    values = arrays.get(f"{name}.values", columns)
    try:
        matrix = csr_matrix((values, columns, starts), shape=shape)
        matrix.check_format(full_check=True)
    except ValueError as error:
        raise damaged_file(path, f"{name} is not a sparse matrix ({quoted(error)})") from error
    return matrix


def _weight_shapes(entry: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the shapes of the ranker's weights. Older files have one row per label."""
    n_labels, n_features, n_dense = (entry[f"n_{key}"] for key in ("labels", "features", "dense"))
    if not entry.get(_BY_FEATURE):
        return {"weights": (n_labels, n_features + n_dense)}
    return {"weights": (n_features, n_labels), "dense_weights": (n_labels, n_dense)}


def _sparse_arrays(name: str, weights: csr_matrix, *, compact: bool) -> dict[str, NDArray[Any]]:
    """Return the arrays in which weights of a ranker are stored.

    If ``compact``, weights take 8 bits (see `_round_to_levels`) and their columns 16 bits: each row
    is cut into blocks of `_BLOCK` columns, which are stored as rows.
    """
    if not compact:
        return {
            f"{name}.values": weights.data.astype(np.float32, copy=False),
            f"{name}.columns": weights.indices.astype(np.int32, copy=False),
            f"{name}.starts": weights.indptr.astype(np.int64, copy=False),
        }
    n_rows, n_columns = weights.shape
    n_blocks = _n_blocks(n_columns)
    parts = (weights.data, weights.indices, weights.indptr)
    padded = csr_matrix(parts, shape=(n_rows, n_blocks * _BLOCK))
    blocks = csr_matrix(padded.reshape((n_rows * n_blocks, _BLOCK)))
    values, levels = _round_to_levels(blocks.data)
    return {
        f"{name}.values": values,
        f"{name}.levels": levels,
        f"{name}.columns": blocks.indices.astype(np.uint16),
        f"{name}.starts": blocks.indptr.astype(np.int64),
    }


def _round_to_levels(weights: NDArray[Any]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Round the absolute value of each weight to the nearest of 128 levels.

    The levels are 0 and a geometric sequence, so that small and large weights have the same
    relative error. Return the level index of each weight, with the weight's sign, and the levels.
    """
    magnitudes = np.abs(weights)
    highest = max(magnitudes.max(initial=0), np.finfo(np.float32).tiny * _LEVEL_RANGE)
    lowest = max(magnitudes.min(initial=highest), highest / _LEVEL_RANGE)
    levels = np.append(0, np.geomspace(lowest, highest, _N_LEVELS)).astype(np.float32)
    indices = np.searchsorted((levels[:-1] + levels[1:]) / 2, magnitudes)
    return (indices * np.sign(weights)).astype(np.int8), levels


def _load_sparse(
    path: Path,
    name: str,
    arrays: Mapping[str, NDArray[Any]],
    shape: tuple[int, int],
    *,
    compact: bool,
) -> csr_matrix:
    """Return the float32 weights that `_sparse_arrays` stored."""
    if not compact:
        weights = _csr(path, name, arrays, shape)
    else:
        n_rows, n_columns = shape
        n_blocks = _n_blocks(n_columns)
        values, levels = arrays[f"{name}.values"], arrays.get(f"{name}.levels")
        if levels is None:  # float16, as earlier versions stored weights
            values = values.astype(np.float32)
        else:
            # the absolute value of −128 would be level 128, which does not exist
            indices = np.minimum(np.abs(values.astype(np.int16)), _N_LEVELS)
            values = levels[indices] * np.sign(values)
        whole = {**arrays, f"{name}.values": values}
        blocks = _csr(path, name, whole, (n_rows * n_blocks, _BLOCK))
        padded = csr_matrix(blocks.reshape((n_rows, n_blocks * _BLOCK)))
        if (padded.indices >= n_columns).any():
            raise damaged_file(path, f"{name}.columns has a column outside 0..{n_columns - 1}")
        weights = csr_matrix((padded.data, padded.indices, padded.indptr), shape=shape)
    if not weights.has_canonical_format:
        raise damaged_file(path, f"{name}.columns are not ascending within a row")
    return weights


def _n_blocks(n_columns: int) -> int:
    return max(-(-n_columns // _BLOCK), 1)
