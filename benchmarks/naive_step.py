"""A naive training step in plain torch, written from the description in SPEC §8.

Like the published program, it gathers B×K×D label rows, sorts all paths twice, compares every path
with every positive in a Python loop, writes a dense L×D gradient and runs AdamW over every row.
"""

import math

import torch
from torch import nn
from torch.nn.functional import logsigmoid


class NaiveStep:
    """The parts after the encoder, initialised with the weights of a model, which it takes over.

    Both steps therefore search the same graph with the same weights, and no table is stored twice:
    float32 weights of the model are trained in place.
    """

    def __init__(self, shape, model):
        self.shape = shape
        self.edge_labels = model.graph.edge_labels

        def parameter(weight):
            return nn.Parameter(weight.detach().float())

        self.clusters, self.cluster_bias = map(parameter, model.clusters.parameters())
        self.labels, self.label_bias = map(parameter, model.labels.parameters())
        self.edges = parameter(model.graph.edge_logits)
        parameters = [self.clusters, self.cluster_bias, self.labels, self.label_bias, self.edges]
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-3)

    def search(self, embedding, parents):
        """Return all paths and the shortlist, labels and scores, by two full sorts of all paths."""
        clusters = self.cluster_scores(embedding)
        rank = torch.cat([clusters.detach(), clusters.new_zeros(len(clusters), 1)], dim=1)
        size = min(self.shape.train_clusters, clusters.shape[1])
        beam = rank.scatter(1, parents, math.inf)[:, :-1].topk(size).indices
        return self.expand(clusters, beam)

    def cluster_scores(self, embedding):
        clusters = torch.addmm(self.cluster_bias, embedding, self.clusters.T).softmax(dim=1)
        return (self.shape.alpha * clusters).clamp(max=1)

    def expand(self, clusters, beam):
        shape = self.shape
        edge_scores = (shape.beta * self.edges[beam].softmax(dim=-1)).clamp(max=1)
        scores = (clusters.gather(1, beam).unsqueeze(-1) * edge_scores).flatten(1)  # (B, P)
        labels = self.edge_labels[beam].flatten(1)
        scores, order = scores.sort(dim=1, descending=True)
        labels = labels.gather(1, order)
        labels, order = labels.sort(dim=1, stable=True)  # the best path of a label comes first
        scores = scores.gather(1, order)
        again = torch.zeros_like(labels, dtype=torch.bool)
        again[:, 1:] = labels[:, 1:] == labels[:, :-1]
        best = scores.masked_fill(again, 0).topk(min(shape.shortlist_size, scores.shape[1]))
        return labels, scores, labels.gather(1, best.indices), best.values

    def classify(self, embedding, labels):
        rows = self.labels[labels]  # (B, K, D)
        return torch.einsum("bkd,bd->bk", rows, embedding) + self.label_bias[labels]

    def loss(self, paths, logits, positives):
        all_labels, all_scores, labels, scores = paths
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

    @torch.no_grad()
    def rank(self, embedding, top_k):
        """Return the k best labels and their p, with the same search and gather."""
        clusters = self.cluster_scores(embedding)
        beam = clusters.topk(self.shape.beam_size).indices
        _, _, labels, scores = self.expand(clusters, beam)
        p = self.classify(embedding, labels).sigmoid() * scores
        best = p.topk(min(top_k, p.shape[1]))
        return labels.gather(1, best.indices), best.values


def naive_stepper(naive, encoder, batches, optimizer=None):
    """Return a function that runs step i of the naive program and calls ``mark`` after each part.

    ``optimizer`` updates the encoder; with None it is not updated.
    """

    def step(i, mark=lambda part: None):
        batch = batches[i % len(batches)]
        embedding = encoder(batch.tokens).float()
        mark("encoder forward")
        leaf = embedding.detach().requires_grad_()
        paths = naive.search(leaf, batch.parents)
        mark("search")
        logits = naive.classify(leaf, paths[2])
        mark("classifier")
        loss = naive.loss(paths, logits, batch.positives)
        mark("loss")
        loss.backward()
        mark("backward")
        embedding.backward(leaf.grad)
        mark("encoder backward")
        naive.update()
        mark("update")
        if optimizer is not None:
            optimizer.step()
        encoder.zero_grad(set_to_none=True)
        mark("encoder update")

    return step
