"""All routes of the HTTP API."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Path, Query, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import TypeAdapter

import elias
from elias.inference.explain import clusters_of_label, labels_of_cluster
from elias.inference.predictor import TOP_K
from elias.model.elias import EliasModel
from elias.serve import schemas
from elias.serve.backend import Backend, Job, Result, ServedModel
from elias.serve.middleware import LOG_FIELDS
from elias.serve.schemas import RequestError, error_schemas
from elias.serve.settings import MAX_EXPLAINED, MAX_LABELS

_ANY: TypeAdapter[Any] = TypeAdapter(Any)
N_DESCRIBING = 3
"""Number of labels that describe a cluster."""
_FEW_VALUES = 100
"""Maximum number of labels in an answer that is encoded on the event loop, in some 50 µs."""

Count = Annotated[int, Query(ge=1, le=200, description="Maximum number of results.")]
Start = Annotated[int, Query(ge=0, le=10_000_000, description="Number of results to skip.")]
Member = Annotated[int, Query(ge=0, le=1000, description="Ensemble member, counted from 0.")]
Id = Annotated[int, Path(ge=0, le=2**53)]
NameQuery = Annotated[str, Query(max_length=200, description="Parts of a label name.")]


def add_routes(api: FastAPI, backend: Backend) -> None:
    """Add all routes of the API."""
    for router in (_text_routes(backend), _state_routes(backend), _index_routes(backend)):
        api.routes.extend(router.routes)  # include_router would hide their paths from the metrics


def _text_routes(backend: Backend) -> APIRouter:
    errors = error_schemas(401, 408, 413, 422, 429, 503)
    api = APIRouter(tags=["labels of texts"], responses=errors)
    max_inputs = backend.settings.limits.max_inputs

    @api.post("/predict", response_model=list[list[schemas.ScoredLabel]])
    async def predict(body: schemas.PredictRequest, request: Request) -> Response:
        """Rank the labels of each text, best first."""
        top_k = body.top_k or (TOP_K if body.threshold is None else MAX_LABELS)
        job = Job("predict", body.inputs, top_k, threshold=body.threshold)
        return await _respond(backend, job, max_inputs, request)

    @api.post("/explain", response_model=list[schemas.Why], responses=error_schemas(404))
    async def explain(body: schemas.ExplainRequest, request: Request) -> Response:
        """Explain the labels of each text by their clusters and the factors of their scores."""
        if body.words and len(body.inputs) > 1:
            raise RequestError(
                413, "words=true explains one text per request; send one text, or leave out words"
            )
        job = Job("explain", body.inputs, **body.model_dump(exclude={"inputs"}))
        return await _respond(backend, job, min(MAX_EXPLAINED, max_inputs), request)

    return api


async def _respond(backend: Backend, job: Job, max_inputs: int, request: Request) -> Response:
    """Return the result of a job as JSON, without validating it against the schema."""
    rows = await compute(backend, job, max_inputs, request)
    if job.kind == "predict" and len(rows) * job.top_k <= _FEW_VALUES:
        content = _to_json(rows)
    else:  # on a thread, to keep the event loop free
        content = await asyncio.to_thread(_to_json, rows)
    return Response(content, media_type="application/json")


async def compute(backend: Backend, job: Job, max_inputs: int, request: Request) -> Result:
    """Check a job, and wait for its result until the timeout or until the client disconnects."""
    n_texts, max_text = len(job.texts), backend.settings.limits.max_text
    if n_texts > max_inputs:
        raise RequestError(413, f"inputs: {n_texts} texts; send at most {max_inputs} per request")
    for i, text in enumerate(job.texts):
        if len(text) > max_text:
            raise RequestError(
                413,
                f"inputs.{i}: {len(text):,} characters; shorten the text to at most {max_text:,}",
            )
    fields = request.scope[LOG_FIELDS]
    fields |= {"inputs": n_texts, "characters": sum(map(len, job.texts))}
    if backend.settings.log_texts:
        fields["texts"] = job.texts
    if job.label is not None:
        _check_id("label", job.label, backend.served.model.n_labels)
    result = asyncio.ensure_future(backend.submit(job))
    disconnect = asyncio.ensure_future(_disconnected(request))
    timeout = backend.settings.limits.timeout
    try:
        await asyncio.wait(
            {result, disconnect}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
        )
        if result.done():
            return result.result()
        if disconnect.done():
            raise RequestError(408, "the client has disconnected")  # for the log only
        retry = {"Retry-After": str(backend.retry_after)}
        raise RequestError(503, f"no result within {timeout:g} s; try again later", retry)
    finally:
        result.cancel()
        disconnect.cancel()


def _to_json(rows: Result) -> bytes:
    """Encode rows as JSON, one at a time, so that other threads can run in between."""
    return b"[" + b",".join(map(_ANY.dump_json, rows)) + b"]"


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _state_routes(backend: Backend) -> APIRouter:
    api = APIRouter(tags=["state"])

    @api.get("/health", responses=error_schemas(503))
    async def health() -> schemas.Status:
        """Return ok if the process is alive and workers do not die repeatedly."""
        error = backend.settings.health_error()
        if error is not None:
            raise RequestError(503, error, {"Retry-After": "30"})
        return schemas.Status(status="ok")

    @api.get("/ready", responses=error_schemas(503))
    async def ready() -> schemas.Status:
        """Return ready if a model is loaded and requests are accepted."""
        backend.check_ready()
        return schemas.Status(status="ready")

    @api.get("/info", responses=error_schemas(401, 503))
    async def info() -> schemas.Info:
        """Describe the served model and the limits of a request."""
        served = backend.served
        model, probabilities = served.model, served.model.probabilities
        stages: list[dict[str, Any]] = list(model.metadata.get("metrics", {}).values()) or [{}]
        metrics = stages[-1].get("test") or stages[-1].get("validation") or {}
        names = ("max_inputs", "max_text", "max_body")
        limits = {name: getattr(backend.settings.limits, name) for name in names}
        decisions = None
        if probabilities is not None:
            decisions = schemas.Decisions(
                thresholds=probabilities.thresholds.tolist(),
                precision=probabilities.precision.round(4).tolist(),
                recall=probabilities.recall.round(4).tolist(),
                f1=probabilities.threshold("f1"),
            )
        return schemas.Info(
            version=elias.__version__,
            model=backend.settings.name,
            loaded_at=served.loaded_at,
            n_labels=model.n_labels,
            n_clusters=model.model.graph.n_clusters,
            n_members=len(served.members),
            encoder=model.config.encoder.kind,
            components=list(model.components),
            metrics={name: value for name, value in metrics.items() if value is not None},
            decisions=decisions,
            limits=schemas.ServedLimits(**limits, max_top_k=MAX_LABELS),
        )

    @api.get("/examples", responses=error_schemas(401, 503))
    async def examples() -> schemas.Examples:
        """Return example texts."""
        return schemas.Examples(examples=backend.served.examples)

    @api.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {}}}, **error_schemas(401)},
    )
    def metrics() -> Response:
        """Return the Prometheus metrics of all workers together."""
        return Response(backend.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    return api


def _index_routes(backend: Backend) -> APIRouter:
    """Return the routes to browse the index. They are not async, so FastAPI uses threads."""
    api = APIRouter(
        tags=["the index"],
        dependencies=[Depends(_check_query)],
        responses=error_schemas(401, 422, 503),
    )

    @api.get("/labels")
    def labels(q: NameQuery = "", limit: Count = 20) -> schemas.LabelList:
        """Find labels by parts of their names, ignoring case."""
        served = backend.served
        hits = [schemas.LabelHit(**_hit(served, i)) for i in served.search.find(q, limit)]
        return schemas.LabelList(labels=hits)

    @api.get("/labels/{label_id}", responses=error_schemas(404))
    def label(
        label_id: Id, limit: Count = 20, start: Start = 0, member: Member = 0
    ) -> schemas.LabelPage:
        """Return a label and its clusters."""
        served = backend.served
        model = _member(served, member)
        _check_id("label", label_id, served.model.n_labels)
        edges, table = clusters_of_label(model, label_id), served.model.label_table
        clusters = []
        for cluster, score in edges[start : start + limit]:
            names = [table[i] for i, _ in labels_of_cluster(model, cluster, N_DESCRIBING)]
            clusters.append(schemas.ClusterEdge(id=cluster, labels=names, edge_score=score))
        synonyms, description = table.about(label_id)
        return schemas.LabelPage(
            **_hit(served, label_id),
            synonyms=list(synonyms),
            description=description,
            member=member,
            n_clusters=len(edges),
            clusters=clusters,
        )

    @api.get("/clusters/{cluster_id}", responses=error_schemas(404))
    def cluster(
        cluster_id: Id, limit: Count = 50, start: Start = 0, member: Member = 0
    ) -> schemas.ClusterPage:
        """Return a cluster and its labels."""
        served = backend.served
        model = _member(served, member)
        _check_id("cluster", cluster_id, model.graph.n_clusters)
        edges, table = labels_of_cluster(model, cluster_id), served.model.label_table
        labels = [
            schemas.LabelEdge(id=i, label=table[i], uri=table.id(i), edge_score=score)
            for i, score in edges[start : start + limit]
        ]
        return schemas.ClusterPage(id=cluster_id, member=member, n_labels=len(edges), labels=labels)

    return api


def _check_query(request: Request) -> None:
    """Raise an error for a query parameter that the route does not have."""
    known = [field.alias for field in request.scope["route"].dependant.query_params]
    for name in request.query_params:
        if name not in known:
            raise RequestError(422, f"unknown parameter {schemas.suggest_name(name, known)}")


def _member(served: ServedModel, member: int) -> EliasModel:
    _check_id("member", member, len(served.members))
    return served.members[member].model


def _check_id(what: str, number: int, count: int) -> None:
    """Raise an error if the model does not have this label, cluster or member."""
    if number >= count:
        message = f"there is no {what} {number}; {what} ids go from 0 to {count - 1}"
        raise RequestError(404, message)


def _hit(served: ServedModel, label: int) -> dict[str, Any]:
    """Return the fields of `schemas.LabelHit` for a label."""
    return {
        "id": label,
        "label": served.model.label_names[label],
        "uri": served.model.label_table.id(label),
        "frequency": served.model.label_frequency(label),
    }
