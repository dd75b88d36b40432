"""The routes to walk about in the index: labels by name, a label's clusters, a cluster's labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import Path, Query

from elias.serve.errors import Refused, documented
from elias.serve.schemas import ClusterEdge, ClusterPage, LabelEdge, LabelHit, LabelList, LabelPage

if TYPE_CHECKING:
    from fastapi import FastAPI

    from elias.inference.graph_view import GraphView
    from elias.serve.backend import Backend, Served


N_DESCRIBING = 3
"""Labels that describe a cluster."""
_LONGEST_QUERY = 200

Count = Annotated[int, Query(ge=1, le=200, description="How many, at most.")]
Start = Annotated[int, Query(ge=0, le=10_000_000, description="How many to skip.")]
Member = Annotated[int, Query(ge=0, le=1000, description="Which member of an ensemble, from 0.")]
Id = Annotated[int, Path(ge=0, le=2**53)]


def browsing_routes(api: FastAPI, backend: Backend) -> None:
    """Add the routes. They are plain functions, so that they run beside the event loop."""
    failures = documented(401, 404, 422, 503)

    @api.get("/labels", responses=documented(401, 422, 503), tags=["the index"])
    def labels(
        q: Annotated[str, Query(max_length=_LONGEST_QUERY, description="Parts of a name.")] = "",
        limit: Count = 20,
    ) -> LabelList:
        """Find labels by parts of their names, in any case."""
        served = backend.served
        return LabelList(labels=[_hit(served, i) for i in served.search.find(q, limit)])

    @api.get("/labels/{label_id}", responses=failures, tags=["the index"])
    def label(label_id: Id, limit: Count = 20, start: Start = 0, member: Member = 0) -> LabelPage:
        """Show a label and the clusters it hangs under."""
        served = backend.served
        graph = _graph(served, member)
        if label_id >= served.model.n_labels:
            raise Refused(404, f"there is no label {label_id}")
        return LabelPage(
            **dict(_hit(served, label_id)),
            member=member,
            n_clusters=graph.n_clusters_of(label_id),
            clusters=[
                ClusterEdge(
                    id=edge.id,
                    labels=[served.name(i) for i, _ in graph.labels_of(edge.id, N_DESCRIBING)],
                    edge_score=edge.score,
                )
                for edge in graph.clusters_of(label_id, limit, start)
            ],
        )

    @api.get("/clusters/{cluster_id}", responses=failures, tags=["the index"])
    def cluster(
        cluster_id: Id, limit: Count = 50, start: Start = 0, member: Member = 0
    ) -> ClusterPage:
        """Show a cluster and the labels that hang under it."""
        served = backend.served
        graph = _graph(served, member)
        if cluster_id >= graph.n_clusters:
            raise Refused(404, f"there is no cluster {cluster_id}")
        return ClusterPage(
            id=cluster_id,
            member=member,
            n_labels=graph.n_labels_of(cluster_id),
            labels=[
                LabelEdge(id=edge.id, label=served.name(edge.id), edge_score=edge.score)
                for edge in graph.labels_of(cluster_id, limit, start)
            ],
        )


def _graph(served: Served, member: int) -> GraphView:
    if member >= len(served.graphs):
        raise Refused(404, f"there is no member {member}; the model has {len(served.graphs)}")
    return served.graphs[member]


def _hit(served: Served, label: int) -> LabelHit:
    return LabelHit(id=label, label=served.name(label), frequency=served.frequency(label))
