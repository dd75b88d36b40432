"""Export encoder and search as one ONNX graph, with tokenizer and label names as metadata."""

from __future__ import annotations

import copy
import json
import logging
import math
import secrets
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from elias.errors import ModelError
from elias.model.elias import EliasModel, SearchSizes
from elias.model.encoder import BagEncoder
from elias.model.one_vs_all import OneVsAll
from elias.persistence.onnx_runtime import BAG, FORMAT, METADATA, TRANSFORMER, missing_package

if TYPE_CHECKING:
    from elias.inference.predictor import Elias


OPSET = 18
"""ONNX operator set; version 18 is the first with scatter-max."""
TOP_K = 100
"""Default number of labels that an exported model ranks."""
_QUANTISED = ["MatMul", "Gather"]
"""Operators whose matrices are quantised; edges use GatherND, so they are not quantised."""
_DENSE_RATIO = 16
"""Score all L labels by one matrix product if L/K is at most this, for K shortlisted labels."""
_MAX_BYTES = 2**31 - 2**20
"""Maximum size of an ONNX file, which is a single protobuf message."""


def export_onnx(
    elias: Elias,
    path: Path,
    *,
    top_k: int | None = None,
    int8: bool = False,
    overwrite: bool = False,
) -> None:
    """Write encoder and search to a file for `OnnxModel`; see `Elias.export_onnx`.

    Raises:
        ModelError: If the file exists, onnx is not installed, or the model cannot be exported.
    """
    model, sizes = elias.model, elias.sizes
    if elias.others:
        raise ModelError("an ensemble is not one graph; export each of its members instead")
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise ModelError(
            f"{path}: is a folder or in no folder; name a file in a folder that exists"
        )
    if path.exists() and not overwrite:
        raise ModelError(f"{path}: already exists; choose another file, or add --overwrite")
    try:
        import onnx
        import onnxscript
    except ImportError as error:
        raise missing_package(str(error.name)) from None
    del onnxscript  # torch.onnx imports it, late and with a long traceback
    if model.encoder.reads_features:
        raise ModelError("a model trained on features reads no text; it cannot be exported")
    weights = sum(tensor.nbytes for tensor in model.state_dict().values())
    if weights > _MAX_BYTES:
        raise ModelError(
            f"the weights take {weights / 2**30:.1f} GiB, more than the 2 GiB of an ONNX file; "
            "the model cannot be exported"
        )
    encoder: Any = model.encoder
    if isinstance(encoder, BagEncoder):
        assert encoder.featurizer is not None
        names = ("words", "ngrams", "char_ngrams", "word_ngrams")
        entry = {name: getattr(encoder.featurizer, name) for name in names}
        entry |= {"kind": BAG, "idf": encoder.featurizer.idf.tolist()}
    else:
        tokenizer = encoder.tokenizer.to_str()
        entry = {"kind": TRANSFORMER, "tokenizer": tokenizer, "pad_id": encoder.pad_id}
    width = min(top_k or TOP_K, sizes.shortlist_size, model.n_labels)
    metadata = {
        "format": FORMAT,
        "encoder": entry,
        "labels": list(elias.label_names),
        "top_k": width,
    }
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        # a copy: the model keeps its device and its mode
        graph = _Graph(copy.deepcopy(model).cpu().eval(), sizes, width)
        with _quiet():
            graph.write(partial)
            if int8:
                _quantise(partial)
            proto = onnx.load(str(partial))
            prop = proto.metadata_props.add()
            prop.key, prop.value = METADATA, json.dumps(metadata)
            onnx.save(proto, str(partial))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _quantise(path: Path) -> None:
    """Store the matrices of a graph, and the vectors of a bag, as 8-bit integers."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    proto = onnx.load(str(path))
    del proto.graph.value_info[:]  # shapes that quantisation makes wrong
    quantize_dynamic(
        proto,
        str(path),
        weight_type=QuantType.QInt8,
        op_types_to_quantize=_QUANTISED,
        per_channel=True,
    )


class _Graph(nn.Module):
    """Map padded tokens to the k best labels and their scores p, like `EliasModel.rank`."""

    def __init__(self, model: EliasModel, sizes: SearchSizes, top_k: int) -> None:
        super().__init__()
        is_bag = isinstance(model.encoder, BagEncoder)
        self.encoder = _Bag(model.encoder) if is_bag else _Transformer(model.encoder)
        self.second_input = "weights" if is_bag else "mask"
        self.search = _AllLabels(model) if isinstance(model, OneVsAll) else _Search(model, sizes)
        self.n_labels = model.n_labels
        self.top_k = top_k

    def forward(self, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return labels and scores (B, k); a slot without a label holds L and 0."""
        labels, log_p = self.search(self.encoder(ids, weights))
        best = log_p.topk(self.top_k, dim=1)
        ranked = labels.gather(1, best.indices)
        return ranked.masked_fill(best.values == -math.inf, self.n_labels), best.values.exp()

    def write(self, path: Path) -> None:
        """Export the graph to a file, traced on an example of two texts with three tokens each."""
        ids = torch.zeros((2, 3), dtype=torch.int64)
        weights = ids.float() + 1 if self.second_input == "weights" else ids + 1
        shape = {0: torch.export.Dim("texts"), 1: torch.export.Dim("tokens")}
        torch.onnx.export(
            self,
            (ids, weights),
            str(path),
            input_names=["ids", self.second_input],
            output_names=["labels", "scores"],
            dynamic_shapes=(shape, shape),
            opset_version=OPSET,
            dynamo=True,
            external_data=False,
            verbose=False,
        )


class _Bag(nn.Module):
    """`BagEncoder` on padded ids; padding has weight 0."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.vectors = encoder.vectors
        self.widen, self.narrow, self.norm = encoder.widen, encoder.narrow, encoder.norm

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        """Return φ(x)."""
        vectors = nn.functional.embedding(ids, self.vectors)  # (B, T, D)
        summed = (weights.unsqueeze(1) @ vectors).squeeze(1)
        mixed: Tensor = self.norm(summed + self.narrow(nn.functional.gelu(self.widen(summed))))
        return mixed


class _Transformer(nn.Module):
    """`TransformerEncoder` on padded ids and a mask of the tokens."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.transformer, self.bottleneck = encoder.transformer, encoder.bottleneck
        self.attention_mask, self.pooling = encoder.attention_mask, encoder.pooling

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return φ(x)."""
        attention = self.attention_mask(mask > 0)
        hidden = self.transformer(input_ids=ids, attention_mask=attention).last_hidden_state
        if self.pooling == "cls":
            pooled = hidden[:, 0]
        else:
            inside = mask.unsqueeze(-1).to(hidden.dtype)
            pooled = (hidden * inside).sum(dim=1) / inside.sum(dim=1)
        embedding: Tensor = self.bottleneck(pooled)
        return embedding


class _Search(nn.Module):
    """`EliasModel.rank` in ONNX operations, dense over the labels.

    TopK of ONNX is stable. The labels are therefore sorted by the second key, then by the first;
    labels with equal keys stay in the order of their ids.
    """

    edge_labels: Tensor
    edge_log: Tensor

    def __init__(self, model: EliasModel, sizes: SearchSizes) -> None:
        super().__init__()
        graph = model.graph
        self.log_alpha = math.log(model.alpha)
        self.n_labels = model.n_labels
        self.beam_size = min(sizes.beam_size, graph.n_clusters)
        self.shortlist_size = min(sizes.shortlist_size, model.n_labels)
        self.clusters, self.labels = _linear(model.clusters), _linear(model.labels)
        with torch.no_grad():
            edge_log = graph.unsaturated_log().detach().float()
        self.register_buffer("edge_log", edge_log)
        self.register_buffer("edge_labels", graph.edge_labels)
        self.all_at_once = model.n_labels <= _DENSE_RATIO * self.shortlist_size

    def forward(self, embedding: Tensor) -> tuple[Tensor, Tensor]:
        """Return the shortlisted labels (B, K), ascending, and log p; -inf for padding."""
        cluster_log = self.log_alpha + self.clusters(embedding).log_softmax(dim=-1)
        beam = cluster_log.topk(self.beam_size, dim=1)
        cluster, edge = beam.values.unsqueeze(-1), self.edge_log[beam.indices]  # (B, b, E)
        uncut = (cluster + edge).flatten(1)  # breaks ties of saturated scores
        scores = (cluster.clamp(max=0) + edge.clamp(max=0)).flatten(1)
        paths = self.edge_labels[beam.indices].flatten(1)  # L in empty slots

        nothing = torch.full((1, self.n_labels + 1), -math.inf).expand(embedding.shape[0], -1)
        best = nothing.scatter_reduce(1, paths, scores, "amax")
        wins = scores == best.gather(1, paths)
        tie = nothing.scatter_reduce(1, paths, uncut.masked_fill(~wins, -math.inf), "amax")

        best, tie = best[:, : self.n_labels], tie[:, : self.n_labels]
        order = tie.topk(self.n_labels, dim=1).indices
        top = best.gather(1, order).topk(self.shortlist_size, dim=1).indices
        labels = order.gather(1, top).topk(self.shortlist_size, dim=1, largest=False).values
        path_log = best.gather(1, labels)
        return labels, _log_sigmoid(self._logits(embedding, labels)) + path_log

    def _logits(self, embedding: Tensor, labels: Tensor) -> Tensor:
        if self.all_at_once:
            logits: Tensor = self.labels(embedding)
            return logits.gather(1, labels)
        rows = self.labels.weight[labels]  # (B, K, D)
        return (rows @ embedding.unsqueeze(-1)).squeeze(-1) + self.labels.bias[labels]


class _AllLabels(nn.Module):
    """Score every label, like `OneVsAll.rank`."""

    def __init__(self, model: EliasModel) -> None:
        super().__init__()
        self.labels = _linear(model.labels)
        self.n_labels = model.n_labels

    def forward(self, embedding: Tensor) -> tuple[Tensor, Tensor]:
        """Return all labels and log p."""
        labels = torch.arange(self.n_labels).unsqueeze(0).expand(embedding.shape[0], -1)
        return labels, _log_sigmoid(self.labels(embedding))


def _log_sigmoid(logits: Tensor) -> Tensor:
    # logsigmoid of torch is exported as log(sigmoid), which is -inf for a low logit
    return -nn.functional.softplus(-logits)


def _linear(rows: Any) -> nn.Linear:
    """Return classifiers as a linear layer."""
    layer = nn.Linear(rows.weight.shape[1], rows.weight.shape[0], device="meta")
    layer.weight = nn.Parameter(rows.weight.detach().float(), requires_grad=False)
    layer.bias = nn.Parameter(rows.bias.detach().float(), requires_grad=False)
    return layer


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the log messages and warnings of the exporters."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
