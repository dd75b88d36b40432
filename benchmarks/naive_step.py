"""The naive training step: what SPEC §8 says the published program does, in plain torch.

It gathers B×K×D label rows, sorts all paths twice, compares every path with every positive in a
Python loop, writes a dense L×D gradient and runs AdamW over every row. Written from that
description alone.
"""

import math

import torch
from torch import nn
from torch.nn.functional import logsigmoid


class NaiveStep:
    """The parts behind the encoder, with their own weights of the same shapes."""

    def __init__(self, shape, model, dim, device):
        self.shape = shape
        labels, clusters, edges = shape.n_labels, shape.n_clusters, shape.n_edges
        self.edge_labels = model.graph.edge_labels

        def parameter(*size):
            return nn.Parameter(torch.empty(size, device=device).uniform_(-0.03, 0.03))

        self.clusters, self.cluster_bias = parameter(clusters, dim), parameter(clusters)
        self.labels, self.label_bias = parameter(labels, dim), parameter(labels)
        self.edges = parameter(clusters, edges)
        parameters = [self.clusters, self.cluster_bias, self.labels, self.label_bias, self.edges]
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-3)

    def search(self, embedding, parents):
        """Return the shortlist's labels and log scores, by two full sorts of all paths."""
        shape = self.shape
        clusters = torch.addmm(self.cluster_bias, embedding, self.clusters.T).softmax(dim=1)
        clusters = (shape.alpha * clusters).clamp(max=1)
        rank = torch.cat([clusters.detach(), clusters.new_zeros(len(clusters), 1)], dim=1)
        beam = rank.scatter(1, parents, math.inf)[:, :-1].topk(shape.train_clusters).indices
        edge_scores = (shape.beta * self.edges[beam].softmax(dim=-1)).clamp(max=1)
        scores = (clusters.gather(1, beam).unsqueeze(-1) * edge_scores).flatten(1)  # (B, P)
        labels = self.edge_labels[beam].flatten(1)
        scores, order = scores.sort(dim=1, descending=True)
        labels = labels.gather(1, order)
        labels, order = labels.sort(dim=1, stable=True)  # the best of equal labels goes first
        scores = scores.gather(1, order)
        again = torch.zeros_like(labels, dtype=torch.bool)
        again[:, 1:] = labels[:, 1:] == labels[:, :-1]
        best = scores.masked_fill(again, 0).topk(min(shape.shortlist_size, scores.shape[1]))
        return labels, scores, labels.gather(1, best.indices), best.values

    def classify(self, embedding, labels):
        rows = self.labels[labels]  # (B, K, D)
        return torch.einsum("bkd,bd->bk", rows, embedding) + self.label_bias[labels]

    def loss(self, found, logits, positives):
        all_labels, all_scores, labels, scores = found
        relevant = torch.zeros_like(labels, dtype=torch.bool)
        shortlist = 0.0
        for column in positives.unbind(dim=1):  # every path with every positive
            relevant |= labels == column.unsqueeze(1)
            hit = all_labels == column.unsqueeze(1)
            reached = (all_scores * hit).amax(dim=1).clamp(min=1e-8)
            shortlist = shortlist - reached.log().sum()
        log_p = logsigmoid(logits) + scores.clamp(min=1e-8).log()
        loss = torch.where(relevant, -log_p, -torch.log1p(-log_p.exp().clamp(max=1 - 1e-6)))
        return loss.mean() + 0.05 * shortlist / positives.numel()

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def head(self, embedding, batch):
        """Return the loss of a batch behind the encoder."""
        found = self.search(embedding, batch.parents)
        logits = self.classify(embedding, found[2])
        return self.loss(found, logits, batch.positives)
