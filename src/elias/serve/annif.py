"""The routes of Annif's REST API, so that Annif and its clients can use a server as a project.

The model is the only project. The answers have the shapes of Annif 1.4.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qsl

from fastapi import FastAPI, Query, Request
from pydantic import AfterValidator, BaseModel, Field, ValidationError

import elias
from elias.data.readers.files import sanitize
from elias.errors import EliasError
from elias.persistence.manifest import CONFIG_FILE, model_folder
from elias.serve.backend import Backend, Job
from elias.serve.routes import compute
from elias.serve.schemas import RequestError, error_schemas
from elias.serve.settings import MAX_LABELS

_MAX_DOCUMENTS = 32
_MAX_FIELDS = 100
_TIE_STEP = 1e-6
_FORM = "send text=…&limit=10 as x-www-form-urlencoded"
_TAGS: list[Any] = ["Annif"]

Limit = Annotated[int, Field(ge=0, lt=2**31, description="Maximum number of results.")]
Threshold = Annotated[float, Field(ge=0, le=1, description="Minimum score of a result.")]
Language = Annotated[str, Field(description="Ignored: labels have the language of the model.")]


class _Options(BaseModel, allow_inf_nan=False):
    limit: Limit = 10
    threshold: Threshold = 0.0
    language: Language = ""


class SuggestForm(_Options):
    """A text in the form that Annif's backend ``http`` sends. Other fields are ignored."""

    text: Annotated[str, Field(description="The text.")]


def _clean(text: str) -> str:
    """Return a text without lone surrogates, which cannot be sent as JSON."""
    return sanitize([text])[0][0]


class Document(BaseModel):
    """A text of a batch. Other keys are ignored."""

    text: str
    document_id: Annotated[str, AfterValidator(_clean)] | None = None


class SuggestBatch(BaseModel):
    """Texts of a batch."""

    documents: Annotated[list[Document], Field(max_length=_MAX_DOCUMENTS)]


class Suggestion(BaseModel):
    """A label that is suggested for a text."""

    uri: str
    label: str
    notation: None = None
    score: float


class Suggestions(BaseModel):
    """The suggestions for a text, best first."""

    results: list[Suggestion]


class DocumentSuggestions(Suggestions):
    """The suggestions for one text of a batch."""

    document_id: str | None


class ProjectBackend(BaseModel):
    """The name of the program that computes suggestions."""

    backend_id: str = "elias"


class Vocabulary(BaseModel):
    """The labels of the model."""

    vocab_id: str
    languages: list[str]
    size: int
    loaded: bool = True


class Project(BaseModel):
    """The model, described as a project of Annif."""

    project_id: str
    name: str
    language: str
    backend: ProjectBackend
    vocab: Vocabulary
    vocab_language: str
    is_trained: bool = True
    modification_time: datetime


class ProjectList(BaseModel):
    """The list of projects, which has only the model."""

    projects: list[Project]


class ApiInfo(BaseModel):
    """The name and version of the server."""

    title: str = "ELIAS, with the REST API of Annif"
    version: str = elias.__version__


def add_annif_routes(api: FastAPI, backend: Backend) -> None:
    """Add the routes below ``/v1``."""
    project_id = re.sub(r"[^A-Za-z0-9_-]+", "-", backend.settings.name).strip("-") or "elias"
    errors = error_schemas(401, 404, 408, 413, 422, 429, 503)
    path = "/v1/projects/{project_id}"

    def check(requested: str) -> None:
        if requested != project_id:
            raise RequestError(404, f"there is no project {requested!r}; use {project_id!r}")

    @api.get("/v1/", responses=error_schemas(401), tags=_TAGS)
    async def api_info() -> ApiInfo:
        """Return the name and version of the server."""
        return ApiInfo()

    @api.get("/v1/projects", responses=error_schemas(401, 503), tags=_TAGS)
    async def projects() -> ProjectList:
        """List the projects. The model is the only one."""
        return ProjectList(projects=[_describe(backend, project_id)])

    @api.get(path, responses=error_schemas(401, 404, 422, 503), tags=_TAGS)
    async def project(project_id: str) -> Project:
        """Describe the model as a project."""
        check(project_id)
        return _describe(backend, project_id)

    form = {"application/x-www-form-urlencoded": {"schema": SuggestForm.model_json_schema()}}
    body_schema = {"requestBody": {"required": True, "content": form}}

    @api.post(f"{path}/suggest", responses=errors, tags=_TAGS, openapi_extra=body_schema)
    async def suggest(project_id: str, request: Request) -> Suggestions:
        """Suggest labels for a text that is sent as a form."""
        check(project_id)
        # Decode it on a thread, because Python decodes a long form slowly.
        fields = await asyncio.to_thread(_parse_form, await request.body())
        (suggestions,) = await _suggest(backend, [fields.text], fields, request)
        return suggestions

    @api.post(f"{path}/suggest-batch", responses=errors, tags=_TAGS)
    async def suggest_batch(
        project_id: str, body: SuggestBatch, options: Annotated[_Options, Query()], request: Request
    ) -> list[DocumentSuggestions]:
        """Suggest labels for up to 32 texts that are sent as JSON."""
        check(project_id)
        texts = [document.text for document in body.documents]
        batch = await _suggest(backend, texts, options, request) if texts else []
        return [
            DocumentSuggestions(results=suggestions.results, document_id=document.document_id)
            for suggestions, document in zip(batch, body.documents, strict=True)
        ]


def _describe(backend: Backend, project_id: str) -> Project:
    served, settings = backend.served, backend.settings
    changed = served.loaded_at
    if isinstance(settings.model, Path):
        with suppress(OSError, EliasError):  # the folder was moved or replaced
            changed = (model_folder(settings.model) / CONFIG_FILE).stat().st_mtime
    language = served.model.data_settings.get("language") or "und"  # undetermined, in ISO 639
    vocab = Vocabulary(vocab_id=project_id, languages=[language], size=served.model.n_labels)
    return Project(
        project_id=project_id,
        name=settings.name,
        language=language,
        backend=ProjectBackend(),
        vocab=vocab,
        vocab_language=language,
        modification_time=datetime.fromtimestamp(changed, UTC),
    )


def _parse_form(body: bytes) -> SuggestForm:
    try:
        fields = parse_qsl(body.decode("ascii"), keep_blank_values=True, max_num_fields=_MAX_FIELDS)
        return SuggestForm.model_validate(dict(fields))
    except ValidationError as error:
        first = error.errors()[0]
        problem = f"{first['loc'][0]}: {first['msg']}"
        if first["type"] == "missing":
            problem = f"the form has no text; {_FORM}"
    except ValueError:
        problem = f"the body is not a form; {_FORM}"
    raise RequestError(422, problem)


async def _suggest(
    backend: Backend, texts: list[str], options: _Options, request: Request
) -> list[Suggestions]:
    job = Job("predict", texts, max(1, min(options.limit, MAX_LABELS)))
    rows = await compute(backend, job, backend.settings.limits.max_inputs, request)
    return [Suggestions(results=_suggestions(row, options)) for row in rows]


def _suggestions(ranking: list[dict[str, Any]], options: _Options) -> list[Suggestion]:
    """Return the suggestions of one text. Scores are probabilities, if the model has them.

    As in Annif, all scores are above 0. Annif sorts by score. Labels with the same probability
    therefore get slightly different scores, which keeps their order. Annif fails on a URI that is
    not in its vocabulary, so labels without a URI are left out if other labels have one.
    """
    suggestions = []
    for rank, label in enumerate(ranking[: options.limit]):
        score = min(1.0, max(0.0, label.get("probability", label["score"])))
        score *= 1 - rank * _TIE_STEP
        uri = label.get("uri", label["label"])
        if uri is not None and score > 0 and score >= options.threshold:
            suggestions.append(Suggestion(uri=uri, label=label["label"], score=score))
    return suggestions
