"""Measure each Triton kernel of a training step alone, on the data of that step."""

from typing import NamedTuple

import torch
from gpu_setup import median_ms

from elias.kernels import expand_beam
from elias.kernels.adamw_state import AdamWRates, History, LinearState
from elias.kernels.gpu import loss as gpu_loss
from elias.kernels.gpu import paths as gpu_paths
from elias.kernels.gpu import rows as gpu_rows
from elias.kernels.gpu import search as gpu_search
from elias.kernels.gpu.adamw import adamw_edges, adamw_pairs
from elias.model.elias import SearchSizes

RATES = AdamWRates(1e-3, 0.9, 0.999, 1e-8, 0.01)


class Case(NamedTuple):
    """Inputs of the kernels of one step."""

    embedding: torch.Tensor
    positives: torch.Tensor
    parents: torch.Tensor
    cluster_log: torch.Tensor
    paths: tuple[torch.Tensor, ...]
    """Beam, its clusters' scores, the labels of edges and their scores."""
    shortlist: tuple
    coefficients: torch.Tensor
    """∂L/∂z, made up."""
    pairs: tuple

    @property
    def beam(self):
        return self.paths[0]


def kernel_times(shape, model, batches, repeat, label_state):
    """Return the time of each kernel."""
    with torch.no_grad():
        edge_log = gpu_paths.edge_log(
            model.graph.edge_logits,
            model.graph.edge_labels,
            n_labels=shape.n_labels,
            beta=shape.beta,
        )
        cases = [make_case(shape, model, batch, edge_log) for batch in batches]
    by_edge = torch.zeros_like(edge_log)
    touched = torch.zeros(shape.n_clusters, dtype=torch.int32, device=edge_log.device)
    state = LinearState(*label_state)
    state = state._replace(last_step=torch.zeros_like(state.last_step))  # restart the step count
    works = {
        **searches(shape, model),
        **paths(edge_log, by_edge, touched),
        **classifiers(shape, model),
        **updates(shape, model, state, by_edge, touched),
    }
    times = each(works, cases, repeat)
    times["touched labels"] = float(cases[0].shortlist.labels.unique().numel())
    return times


def make_case(shape, model, batch, edge_log):
    weight = model.labels.weight.detach()
    embedding = torch.randn(shape.batch, shape.dim, device=weight.device)
    cluster_log = model.unsaturated_log(embedding)
    beam = model.training_beam(cluster_log, batch.parents, shape.train_clusters)
    given = (beam, cluster_log.gather(1, beam), model.graph.edge_labels, edge_log)
    shortlist = expand_beam(
        *given, batch.positives, n_labels=shape.n_labels, shortlist_size=shape.shortlist_size
    )
    coefficients = torch.randn(shortlist.labels.shape, device=weight.device) * 1e-3
    pairs = gpu_rows.pair_rows(shortlist.labels, coefficients, embedding.to(weight.dtype))
    return Case(
        embedding,
        batch.positives,
        batch.parents,
        cluster_log,
        given,
        shortlist,
        coefficients,
        pairs,
    )


def searches(shape, model):
    """Return the timed functions of the search, each taking a case."""
    sizes, graph = SearchSizes(shape.train_clusters, shape.shortlist_size), model.graph

    def expand(**options):
        return lambda case: gpu_search.expand_beam(
            *case.paths, case.positives, shape.n_labels, sizes.shortlist_size, **options
        )

    def list_paths(case):
        n_listed = gpu_search.LISTED_PER_LABEL * sizes.shortlist_size
        gpu_search.list_paths((*case.paths, case.positives), shape.n_labels, n_listed)

    def edge_log(case):
        gpu_paths.edge_log(
            graph.edge_logits,
            graph.edge_labels,
            n_labels=shape.n_labels,
            beta=shape.beta,
            beam=case.beam,
        )

    return {
        "cluster scores": lambda case: model.unsaturated_log(case.embedding),
        "training beam": lambda case: model.training_beam(
            case.cluster_log, case.parents, sizes.beam_size
        ),
        "edge log": edge_log,
        "expand": expand(),
        "expand, its list of paths": list_paths,
        "expand 2048": expand(block=2048, n_warps=16),
        "expand all paths": expand(n_listed=0),
    }


def paths(edge_log, by_edge, touched):
    """Return the timed functions of the path scores, each taking a case."""
    return {
        "path log": lambda case: gpu_paths.path_log(
            case.cluster_log, edge_log, case.beam, case.shortlist.paths
        ),
        "path log backward": lambda case: gpu_paths.path_log_backward(
            case.coefficients,
            case.cluster_log,
            edge_log,
            case.beam,
            case.shortlist.paths,
            by_edge,
            touched,
        ),
    }


def classifiers(shape, model):
    """Return the timed functions of the classifiers, each taking a case."""
    weight, bias = model.labels.weight.detach(), model.labels.bias.detach()

    def loss(case):
        z = case.coefficients
        gpu_loss.shortlist_bce(z, -z.abs(), case.shortlist.labels, case.positives, shape.n_labels)

    def whole_loss(case):
        log_scores = -case.coefficients.abs()
        z = gpu_rows.label_logits(case.embedding, weight, bias, case.shortlist.labels)
        gpu_loss.shortlist_bce(z, log_scores, case.shortlist.labels, case.positives, shape.n_labels)
        gpu_rows.gather_sum(z, weight, case.shortlist.labels)

    return {
        "gather dot": lambda case: gpu_rows.gather_dot(
            case.embedding, weight, bias, case.shortlist.labels
        ),
        "loss": loss,
        "dot, loss and sum": whole_loss,
        "gather sum": lambda case: gpu_rows.gather_sum(
            case.coefficients, weight, case.shortlist.labels
        ),
        "sort pairs": lambda case: gpu_rows.pair_rows(
            case.shortlist.labels, case.coefficients, case.embedding
        ),
    }


def updates(shape, model, state, by_edge, touched):
    """Return the timed functions of the label and edge updates, each taking a case."""
    weight, bias, graph = model.labels.weight.detach(), model.labels.bias.detach(), model.graph
    edge_state = (torch.zeros_like(by_edge), torch.zeros_like(by_edge), torch.zeros_like(touched))
    history = History(by_edge.device)

    def move_labels(warps):
        def move(case):
            history.add(RATES)
            adamw_pairs(weight, bias, state, case.pairs, history, n_warps=warps)

        return move

    def move_edges(case):
        history.add(RATES)
        touched.scatter_(0, case.beam.flatten(), 1)
        adamw_edges(
            graph.edge_logits,
            graph.edge_labels,
            edge_state,
            by_edge,
            touched,
            history,
            n_labels=shape.n_labels,
        )

    return {
        "adamw labels, 1 warp": move_labels(1),
        "adamw labels, 2 warps": move_labels(2),
        "adamw edges": move_edges,
    }


def each(works, cases, repeat):
    """Return the median time of each function; None if it fails, so that the others still run."""
    times = {}
    for name, work in works.items():
        try:
            with torch.no_grad():
                times[name] = median_ms(lambda i, w=work: w(cases[i % len(cases)]), repeat)
        except Exception as error:
            times[name] = None
            print(f"# {name}: {type(error).__name__}: {error}", flush=True)
    return times
