"""Encoder and search as one ONNX graph, with all that goes from text to names in the file."""

from __future__ import annotations

import copy
import json
import logging
import math
import secrets
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from elias.errors import ModelError
from elias.model.elias import EliasModel, SearchSizes
from elias.model.encoder import BagEncoder, TextEncoder
from elias.model.one_vs_all import OneVsAll
from elias.persistence.onnx_runtime import (
    FORMAT,
    METADATA,
    describe_bag,
    describe_tokens,
    need_onnx,
)

if TYPE_CHECKING:
    from elias.inference.predictor import Elias
    from elias.model.transformer import TransformerEncoder


OPSET = 18
"""The first in which scattering takes a maximum."""
TOP_K = 100
"""Labels that an exported model ranks unless told otherwise."""
_QUANTISED = ["MatMul", "Gather"]
"""Products with a fixed matrix, and tables of vectors; edges are looked up by GatherND."""
_DENSE = 16
"""All L labels are scored by one product where L is at most so many times K."""
_LARGEST = 2**31 - 2**20
"""Bytes: a file of ONNX is one message of protobuf, which holds no more."""


def export_onnx(
    path: Path,
    model: EliasModel,
    sizes: SearchSizes,
    label_names: Sequence[str],
    *,
    top_k: int = TOP_K,
    int8: bool = False,
) -> None:
    """Write encoder and search to a file that `OnnxModel` reads; it appears whole or not.

    Raises:
        ModelError: If onnx is not installed, or the model cannot be exported.
    """
    try:
        import onnx
        import onnxscript
    except ImportError as error:
        raise need_onnx(str(error.name)) from None
    del onnxscript  # torch.onnx imports it, late and with a long traceback
    if model.encoder.reads_features:
        raise ModelError("a model that was trained on features reads no text; it is not exported")
    weights = sum(tensor.nbytes for tensor in model.state_dict().values())
    if weights > _LARGEST:
        raise ModelError(
            f"the weights take {weights / 2**30:.1f} GiB, and an ONNX file holds 2; it is not "
            "exported"
        )
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    width = min(top_k, sizes.shortlist_size, model.n_labels)
    try:
        # a copy: the model stays on its device, and training if it was
        graph = _Graph(copy.deepcopy(model).cpu().eval(), sizes, width)
        with _quiet():
            graph.write(partial)
            if int8:
                quantise(partial)
            made = onnx.load(str(partial))
            described = {
                "format": FORMAT,
                "encoder": _describe(model.encoder),
                "labels": list(label_names),
                "top_k": width,
            }
            entry = made.metadata_props.add()
            entry.key, entry.value = METADATA, json.dumps(described)
            onnx.save(made, str(partial))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def export_file(
    model: Elias, path: Path, *, top_k: int | None, int8: bool, overwrite: bool
) -> Path:
    """Write a whole model's last stage; `Elias.export_onnx` says more."""
    if model.others:
        raise ModelError("an ensemble is not one graph; export each of its members instead")
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise ModelError(f"{path}: not a place for a file; name one in a folder that is there")
    if path.exists() and not overwrite:
        raise ModelError(f"{path}: already exists; choose another file, or add --overwrite")
    names, count = model.label_names, top_k or TOP_K
    export_onnx(path, model.model, model.sizes, names, top_k=count, int8=int8)
    return path


def quantise(path: Path) -> None:
    """Hold the matrices of a graph, and the vectors of a bag, as whole numbers of 8 bits."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    made = onnx.load(str(path))
    del made.graph.value_info[:]  # shapes that are no longer true once a matrix is turned
    quantize_dynamic(
        made,
        str(path),
        weight_type=QuantType.QInt8,
        op_types_to_quantize=_QUANTISED,
        per_channel=True,
    )


class _Graph(nn.Module):
    """From padded tokens to the k best labels and their p, as `EliasModel.rank` has them."""

    def __init__(self, model: EliasModel, sizes: SearchSizes, top_k: int) -> None:
        super().__init__()
        self.encoder = (
            _Bag(model.encoder) if isinstance(model.encoder, BagEncoder) else _Tokens(model.encoder)
        )
        self.search = _AllLabels(model) if isinstance(model, OneVsAll) else _Search(model, sizes)
        self.n_labels = model.n_labels
        self.top_k = top_k

    def forward(self, ids: Tensor, beside: Tensor) -> tuple[Tensor, Tensor]:
        """Return labels and scores (B, k); a slot without a label holds L and 0."""
        labels, log_p = self.search(self.encoder(ids, beside))
        best = log_p.topk(self.top_k, dim=1)
        found = labels.gather(1, best.indices)
        return found.masked_fill(best.values == -math.inf, self.n_labels), best.values.exp()

    def write(self, path: Path) -> None:
        """Trace the graph on an example of two texts of three tokens."""
        ids = torch.zeros((2, 3), dtype=torch.int64)
        beside = self.encoder.example(ids)
        shape = {0: torch.export.Dim("texts"), 1: torch.export.Dim("tokens")}
        torch.onnx.export(
            self,
            (ids, beside),
            str(path),
            input_names=["ids", self.encoder.second],
            output_names=["labels", "scores"],
            dynamic_shapes=(shape, shape),
            opset_version=OPSET,
            dynamo=True,
            external_data=False,
            verbose=False,
        )


class _Bag(nn.Module):
    """`BagEncoder` on a rectangle of ids, those beyond a text's end weighing 0."""

    second = "weights"

    def __init__(self, encoder: BagEncoder) -> None:
        super().__init__()
        self.vectors = encoder.vectors
        self.widen, self.narrow, self.norm = encoder.widen, encoder.narrow, encoder.norm

    @staticmethod
    def example(ids: Tensor) -> Tensor:
        return torch.ones(ids.shape)

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        """Return φ(x)."""
        vectors = nn.functional.embedding(ids, self.vectors)  # (B, T, D)
        summed = (weights.unsqueeze(1) @ vectors).squeeze(1)
        mixed: Tensor = self.norm(summed + self.narrow(nn.functional.gelu(self.widen(summed))))
        return mixed


class _Tokens(nn.Module):
    """`TransformerEncoder` on a rectangle of ids, and a mask of the texts' own."""

    second = "mask"

    def __init__(self, encoder: TextEncoder) -> None:
        super().__init__()
        parts: TransformerEncoder = encoder  # type: ignore[assignment]
        self.transformer, self.bottleneck = parts.transformer, parts.bottleneck
        self.attention_mask = parts.attention_mask
        self.first_alone = parts.pooling == "cls"

    @staticmethod
    def example(ids: Tensor) -> Tensor:
        return torch.ones_like(ids)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return φ(x)."""
        ready = self.attention_mask(mask > 0)
        hidden = self.transformer(input_ids=ids, attention_mask=ready).last_hidden_state
        if self.first_alone:
            pooled = hidden[:, 0]
        else:
            inside = mask.unsqueeze(-1).to(hidden.dtype)
            pooled = (hidden * inside).sum(dim=1) / inside.sum(dim=1)
        embedding: Tensor = self.bottleneck(pooled)
        return embedding


class _Search(nn.Module):
    """`EliasModel.rank` in operations that ONNX has: dense over labels where the kernels are not.

    ONNX's TopK puts the lower place first of equal values. So ordering by what comes second, and
    then the result by what comes first, orders by both; and a last one by id comes for free.
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
        self.all_at_once = model.n_labels <= _DENSE * self.shortlist_size

    def forward(self, embedding: Tensor) -> tuple[Tensor, Tensor]:
        """Return the shortlisted labels (B, K), ascending, and log p; -inf where there is none."""
        cluster_log = self.log_alpha + self.clusters(embedding).log_softmax(dim=-1)
        beam = cluster_log.topk(self.beam_size, dim=1)
        cluster, edge = beam.values.unsqueeze(-1), self.edge_log[beam.indices]  # (B, b, E)
        free = (cluster + edge).flatten(1)
        scores = (cluster.clamp(max=0) + edge.clamp(max=0)).flatten(1)
        paths = self.edge_labels[beam.indices].flatten(1)  # L where no edge is

        nothing = torch.full((1, self.n_labels + 1), -math.inf).expand(embedding.shape[0], -1)
        best = nothing.scatter_reduce(1, paths, scores, "amax")
        wins = scores == best.gather(1, paths)
        behind = nothing.scatter_reduce(1, paths, free.masked_fill(~wins, -math.inf), "amax")

        best, behind = best[:, : self.n_labels], behind[:, : self.n_labels]
        order = behind.topk(self.n_labels, dim=1).indices
        kept = best.gather(1, order).topk(self.shortlist_size, dim=1).indices
        labels = order.gather(1, kept).topk(self.shortlist_size, dim=1, largest=False).values
        path_log = best.gather(1, labels)
        return labels, _log_sigmoid(self._logits(embedding, labels)) + path_log

    def _logits(self, embedding: Tensor, labels: Tensor) -> Tensor:
        if self.all_at_once:
            logits: Tensor = self.labels(embedding)
            return logits.gather(1, labels)
        rows = self.labels.weight[labels]  # (B, K, D)
        return (rows @ embedding.unsqueeze(-1)).squeeze(-1) + self.labels.bias[labels]


class _AllLabels(nn.Module):
    """`OneVsAll.rank`: every label is scored."""

    def __init__(self, model: EliasModel) -> None:
        super().__init__()
        self.labels = _linear(model.labels)
        self.n_labels = model.n_labels

    def forward(self, embedding: Tensor) -> tuple[Tensor, Tensor]:
        """Return all labels and log p."""
        logits = self.labels(embedding)
        labels = torch.arange(self.n_labels).unsqueeze(0).expand(embedding.shape[0], -1)
        return labels, _log_sigmoid(logits)


def _log_sigmoid(logits: Tensor) -> Tensor:
    # torch's own would become log(sigmoid), which is -inf for a low logit
    return -nn.functional.softplus(-logits)


def _linear(rows: Any) -> nn.Linear:
    """Return one classifier per row as a layer."""
    layer = nn.Linear(rows.weight.shape[1], rows.weight.shape[0], device="meta")
    layer.weight = nn.Parameter(rows.weight.detach().float(), requires_grad=False)
    layer.bias = nn.Parameter(rows.bias.detach().float(), requires_grad=False)
    return layer


def _describe(encoder: TextEncoder) -> dict[str, Any]:
    if isinstance(encoder, BagEncoder):
        assert encoder.featurizer is not None
        return describe_bag(encoder.featurizer)
    parts: Any = encoder
    return describe_tokens(parts.tokenizer.to_str(), parts.pad_id)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporters from reporting on the terminal."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
