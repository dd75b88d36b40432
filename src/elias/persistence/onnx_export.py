"""Export the encoder and the search as an ONNX graph.

The tokenizer and the label names are stored in the metadata of the file.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from elias.data.atomic import staged_file
from elias.errors import ModelError
from elias.model.elias import EliasModel, SearchSizes
from elias.model.encoder import BagEncoder
from elias.model.one_vs_all import OneVsAll
from elias.persistence.onnx_runtime import BAG, FORMAT, METADATA, TRANSFORMER, missing_package
from elias.rerank.added_labels import DENSE_RULE, AddedLabels

if TYPE_CHECKING:
    from elias.inference.predictor import Elias


OPSET = 18
"""ONNX operator set version. Version 18 is the first that supports scatter-max."""
TOP_K = 100
"""Default number of labels that an exported model ranks."""
_QUANTISED = ["MatMul", "Gather"]
"""Operators whose matrices are quantised. Edges use GatherND and are not quantised."""
_DENSE_RATIO = 16
"""Maximum L/K at which all L labels are scored, not only the K shortlisted labels.

A single matrix product over all labels is then faster than gathering rows.
"""
_MAX_BYTES = 2**31 - 2**20
"""Maximum size of the weights. An ONNX file is a protobuf message of at most 2 GiB."""


def export_onnx(
    elias: Elias,
    path: Path,
    *,
    top_k: int | None = None,
    int8: bool = False,
    overwrite: bool = False,
) -> None:
    """Write the encoder and the search to a file for `OnnxModel`. See `Elias.export_onnx`.

    Raises:
        ModelError: If the file exists, onnx is not installed, or the model cannot be exported.
    """
    model, sizes = elias.model, elias.sizes
    if elias.others:
        raise ModelError("an ensemble cannot be exported; export each of its members instead")
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise ModelError(
            f"{path}: is a folder, or its folder does not exist; give a file in an existing folder"
        )
    if path.exists() and not overwrite:
        raise ModelError(f"{path}: already exists; choose another file, or add overwrite=True")
    try:
        import onnx
        import onnxscript  # noqa: F401 - if it is missing, torch.onnx fails later, unclearly
    except ImportError as error:
        raise missing_package(str(error.name)) from None
    encoder: Any = model.encoder
    is_bag = isinstance(model.encoder, BagEncoder)
    if encoder.reads_features:
        raise ModelError("a model trained on features cannot be exported; train on texts instead")
    if not is_bag and encoder.windows > 1:
        raise ModelError(
            f"a model that reads texts in {encoder.windows} windows cannot be exported; train it "
            "with encoder.windows=1"
        )
    weights = sum(tensor.nbytes for tensor in model.state_dict().values())
    if weights > _MAX_BYTES:
        raise ModelError(
            f"the model cannot be exported: its weights take {weights / 2**30:.1f} GiB, but an "
            "ONNX file holds at most 2 GiB; train a model with smaller embeddings"
        )
    if is_bag:
        names = ("words", "ngrams", "char_ngrams", "word_ngrams")
        entry = {name: getattr(encoder.featurizer, name) for name in names}
        entry |= {"kind": BAG, "idf": encoder.featurizer.idf.tolist()}
    else:
        tokenizer = encoder.tokenizer.to_str()
        entry = {"kind": TRANSFORMER, "tokenizer": tokenizer, "pad_id": encoder.pad_id}
    n_ranked = min(sizes.shortlist_size, model.n_labels)
    if elias.added is not None:
        n_ranked = min(n_ranked + len(elias.added), elias.n_labels)
    width = min(top_k or TOP_K, n_ranked)
    labels = list(elias.label_names)
    metadata = {"format": FORMAT, "encoder": entry, "labels": labels, "top_k": width}
    # export a copy, so that the model keeps its device and mode
    whole = copy.deepcopy(model).cpu().float().eval()
    graph = _Graph(whole, sizes, elias.n_labels, width, elias.added)
    ids = torch.zeros((2, 3), dtype=torch.int64)  # example input: two texts with three tokens each
    shape = {0: torch.export.Dim("texts"), 1: torch.export.Dim("tokens")}
    with staged_file(path) as staged, _quiet():
        torch.onnx.export(
            graph,
            (ids, ids.float() + 1 if is_bag else ids + 1),
            str(staged),
            input_names=["ids", "weights" if is_bag else "mask"],
            output_names=["labels", "scores"],
            dynamic_shapes=(shape, shape),
            opset_version=OPSET,
            dynamo=True,
            external_data=False,
            verbose=False,
        )
        proto = onnx.load(str(staged))
        if int8:  # matrices, and the vectors of a bag encoder
            from onnxruntime.quantization import QuantType, quantize_dynamic

            del proto.graph.value_info[:]  # its shapes are wrong after quantisation
            options: Any = {"weight_type": QuantType.QInt8, "op_types_to_quantize": _QUANTISED}
            quantize_dynamic(proto, str(staged), **options, per_channel=True)
            proto = onnx.load(str(staged))
        for node in proto.graph.node:
            del node.metadata_props[:]  # stack traces of the export, with paths of this machine
        prop = proto.metadata_props.add()
        prop.key, prop.value = METADATA, json.dumps(metadata)
        onnx.save(proto, str(staged))


class _Graph(nn.Module):
    """The exported module. It computes the k best labels of padded texts like `EliasModel.rank`."""

    edge_log: Tensor
    added: Tensor
    added_labels: Tensor
    background: Tensor
    bias: Tensor
    weight: Tensor

    @torch.no_grad()
    def __init__(
        self,
        model: EliasModel,
        sizes: SearchSizes,
        n_labels: int,
        top_k: int,
        added: AddedLabels | None,
    ) -> None:
        super().__init__()
        self.with_added = added is not None
        if added is not None:
            bias, weight = added.bias_and_weight(*DENSE_RULE)
            arrays = {"added": added.vectors, "added_labels": added.labels}
            arrays |= {"background": added.background, "weight": weight}
            for name, array in (arrays | {"bias": bias + added.offset}).items():
                self.register_buffer(name, torch.from_numpy(array))
        self.model, self.n_labels, self.top_k = model, n_labels, top_k
        self.beam_size = min(sizes.beam_size, model.graph.n_clusters)
        self.shortlist_size = min(sizes.shortlist_size, model.n_labels)
        self.register_buffer("edge_log", model.graph.unsaturated_log().detach().float())

    def forward(self, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the best labels and their scores p (B, k). An empty slot has label L and score 0.

        Added labels are scored by their vectors, without comparing words. A label that the search
        finds, too, gets the higher of both scores.
        """
        is_bag = isinstance(self.model.encoder, BagEncoder)
        embedding = self.embed_bag(ids, weights) if is_bag else self.embed(ids, weights)
        if isinstance(self.model, OneVsAll):
            labels = torch.arange(self.model.n_labels).unsqueeze(0).expand(ids.shape[0], -1)
            log_p = _log_sigmoid(_logits(self.model.labels, embedding))
        else:
            labels, log_p = self.search(embedding)
        if self.with_added:
            mean, spread = self.background.T
            similarity = nn.functional.normalize(embedding, dim=1) @ self.added.T
            added_log_p = _log_sigmoid(self.bias + self.weight * (similarity - mean) / spread)
            added_labels = self.added_labels.unsqueeze(0).expand(ids.shape[0], -1)
            nothing = torch.full((1, self.n_labels), -math.inf).expand(ids.shape[0], -1)
            log_p = nothing.scatter_reduce(1, labels, log_p, "amax")
            log_p = log_p.scatter_reduce(1, added_labels, added_log_p, "amax")
            labels = torch.arange(self.n_labels).unsqueeze(0).expand(ids.shape[0], -1)
        best = log_p.topk(self.top_k, dim=1)
        ranked = labels.gather(1, best.indices)
        return ranked.masked_fill(best.values == -math.inf, self.n_labels), best.values.exp()

    def embed_bag(self, ids: Tensor, weights: Tensor) -> Tensor:
        """Return the embeddings φ(x) of a `BagEncoder`. Padding has weight 0."""
        encoder: Any = self.model.encoder
        vectors = nn.functional.embedding(ids, encoder.vectors)  # (B, T, D)
        summed = (weights.unsqueeze(1) @ vectors).squeeze(1)
        mixed = summed + encoder.narrow(nn.functional.gelu(encoder.widen(summed)))
        embedding: Tensor = encoder.norm(mixed)
        return embedding

    def embed(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the embeddings φ(x) of a `TransformerEncoder`."""
        encoder: Any = self.model.encoder
        attention = encoder.attention_mask(mask > 0)
        hidden = encoder.transformer(input_ids=ids, attention_mask=attention).last_hidden_state
        pooled = hidden[:, 0]
        if encoder.pooling != "cls":
            inside = mask.unsqueeze(-1).to(hidden.dtype)
            pooled = (hidden * inside).sum(dim=1) / inside.sum(dim=1)
        embedding: Tensor = encoder.bottleneck(pooled)
        return embedding

    def search(self, embedding: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ids of the shortlisted labels (B, K) in ascending order, and their log scores.

        Padding has a log score of -inf. TopK of ONNX is a stable sort, so sorting by the second key
        and then by the first key sorts by both. Labels with equal keys stay in the order of ids.
        """
        model, n_labels, n_ranked = self.model, self.model.n_labels, self.shortlist_size
        cluster_log = _logits(model.clusters, embedding).log_softmax(dim=-1)
        beam = (math.log(model.alpha) + cluster_log).topk(self.beam_size, dim=1)
        cluster, edge = beam.values.unsqueeze(-1), self.edge_log[beam.indices]  # (B, b, E)
        unsaturated = (cluster + edge).flatten(1)  # scores before min(1, ·), to break ties
        scores = (cluster.clamp(max=0) + edge.clamp(max=0)).flatten(1)
        paths = model.graph.edge_labels[beam.indices].flatten(1)  # L in empty slots

        nothing = torch.full((1, n_labels + 1), -math.inf).expand(embedding.shape[0], -1)
        best = nothing.scatter_reduce(1, paths, scores, "amax")
        wins = scores == best.gather(1, paths)
        tie = nothing.scatter_reduce(1, paths, unsaturated.masked_fill(~wins, -math.inf), "amax")

        order = tie[:, :n_labels].topk(n_labels, dim=1).indices
        top = best.gather(1, order).topk(n_ranked, dim=1).indices
        labels = order.gather(1, top).topk(n_ranked, dim=1, largest=False).values
        if n_labels <= _DENSE_RATIO * n_ranked:
            logits = _logits(model.labels, embedding).gather(1, labels)
        else:
            rows = model.labels.weight[labels]  # (B, K, D)
            logits = (rows @ embedding.unsqueeze(-1)).squeeze(-1) + model.labels.bias[labels]
        return labels, _log_sigmoid(logits) + best.gather(1, labels)


def _logits(rows: Any, embedding: Tensor) -> Tensor:
    return nn.functional.linear(embedding, rows.weight, rows.bias)


def _log_sigmoid(logits: Tensor) -> Tensor:
    # torch exports logsigmoid as log(sigmoid), which is -inf for very low logits
    return -nn.functional.softplus(-logits)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence log messages and warnings during the export."""
    before, handlers = logging.root.manager.disable, logging.root.handlers[:]
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
        logging.root.handlers[:] = handlers  # onnxruntime adds one, which repeats our messages
