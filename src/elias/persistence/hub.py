"""Models on the Hugging Face hub: fetched by name and revision, pushed with their card."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, get_token, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from elias.errors import HUB_PREFIX, ModelError, looks_like_path, quoted
from elias.persistence.manifest import model_folder

_HUB_ID = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
_WRITTEN_PREFIX = re.compile("hf:/{1,2}")  # pathlib drops one of two slashes
_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"
_STALE = [
    *("*.safetensors", "config.json", "labels.t*", "vocabulary.txt", "probabilities.json"),
    *("encoder/*", "ranker/*", "first_encoder/*", "members/*"),
]
"""What an older model in the repository may have that this one has not."""


def hub_id(name: str | Path) -> str | None:
    """Return ``user/model`` or ``user/model@revision`` if a name is on the hub, None for a folder.

    ``hf://user/model`` always is a name on the hub. A `Path` is a folder, and so is a string that
    looks like a path; of other strings, ``user/model`` is a name on the hub.

    >>> hub_id("hf://user/model@v1"), hub_id("user/model@v1")
    ('user/model@v1', 'user/model@v1')
    >>> hub_id(Path("user/model")), hub_id("./model"), hub_id("a/b/c")
    (None, None, None)

    Raises:
        ModelError: If ``hf://`` is followed by something else.
    """
    text = str(name)
    if prefix := _WRITTEN_PREFIX.match(text):
        text = text[prefix.end() :]
        if not _HUB_ID.fullmatch(text):
            raise ModelError(
                f"{HUB_PREFIX}{text}: not a name of the hub; write {HUB_PREFIX}user/model or "
                f"{HUB_PREFIX}user/model@revision"
            )
        return text
    if isinstance(name, Path) or looks_like_path(text.partition("@")[0]):
        return None
    return text if _HUB_ID.fullmatch(text) else None


def place_of(name: str | Path, *, revision: str | None = None, token: str | None = None) -> Path:
    """Return the folder of a saved model, given that folder, its run's or a name of the hub.

    Raises:
        ModelError: If there is no such folder, or a revision is asked for of a folder.
    """
    if hub_id(name) is not None:
        return fetch(name, revision=revision, token=token)
    if revision is not None:
        raise ModelError(f"{name}: revision={revision!r} is for a name of the hub, user/model")
    folder = Path(name)
    if not folder.exists():
        hint = ""
        if _HUB_ID.fullmatch(str(name)):
            hint = f"; for a model of the hub write {HUB_PREFIX}{name}"
        raise ModelError(f"{name}: no such folder; give that of a saved model or a run{hint}")
    return model_folder(folder)


def fetch(name: str | Path, *, revision: str | None = None, token: str | None = None) -> Path:
    """Return the folder of a model of the hub, downloaded unless it is in the hub's cache.

    Args:
        name: ``user/model`` or ``user/model@revision``, with or without ``hf://``.
        revision: A branch, tag or commit, in place of one in the name.
        token: In place of the one that was logged in with.

    Raises:
        ModelError: If there is no such repository or revision, or the hub cannot be reached.
    """
    found = _HUB_ID.fullmatch(hub_id(name) or "")
    assert found is not None, "only names of the hub are fetched"
    repo, revision = found["repo"], revision or found["revision"]
    is_explicit = _WRITTEN_PREFIX.match(str(name)) is not None
    otherwise = "it cannot be downloaded" if is_explicit else "there is no such folder here"
    with _explained(found[0], revision, otherwise):
        return Path(snapshot_download(repo, revision=revision, token=token))


def push(
    folder: Path,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    message: str | None = None,
    token: str | None = None,
) -> str:
    """Upload a saved model in one commit, and return its address; `Elias.push_to_hub` says more."""
    if token is None and get_token() is None:
        raise ModelError(f"{repo_id}: pushing needs a token; {_LOG_IN}")
    api = HfApi(token=token)
    with _explained(repo_id, revision, "it cannot be pushed to"):
        api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            revision=revision,
            commit_message=message or "Upload an ELIAS model",
            delete_patterns=_STALE,
        )
    return str(commit.repo_url)


@contextmanager
def _explained(name: str, revision: str | None, otherwise: str) -> Iterator[None]:
    """Turn what the hub's library raises into one line that says what to do."""
    try:
        yield
    except (OSError, HFValidationError) as error:  # all that it raises on purpose
        raise ModelError(f"{name}: {_problem(error, revision, otherwise)}") from error


def _problem(error: Exception, revision: str | None, otherwise: str) -> str:
    known = {
        GatedRepoError: f"its owner grants access on request; ask on its page, then {_LOG_IN}",
        RepositoryNotFoundError: f"{otherwise}, and the hub shows no such repository; check the "
        f"name, or for a private one {_LOG_IN}",
        RevisionNotFoundError: f"the repository has no revision {revision!r}; name a branch, tag "
        "or commit",
        HFValidationError: f"not a name of the hub ({quoted(error)})",
    }
    for kind, told in known.items():
        if isinstance(error, kind):
            return told
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return f"the hub refuses ({status}): the token may not do this; {_LOG_IN}"
    if status is not None:
        return f"the hub answers {status} ({quoted(error)}); try again later"
    if isinstance(error, OSError) and error.filename is not None:  # a disk that is full, say
        return f"{error.filename}: {quoted(error)}"
    return (
        f"{otherwise}, and the hub cannot be reached or HF_HUB_OFFLINE is set; check the network, "
        "or give the folder of a saved model"
    )
