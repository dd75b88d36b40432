"""A stand-in for the Hugging Face hub: as much of its HTTP interface as a model needs."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import yaml
from huggingface_hub import HfApi, constants

from elias.persistence import hub

TOKEN = "hf_good"


class Hub:
    """Repositories by name, and in each the commits by branch: files by path."""

    def __init__(self):
        self.repos = {}
        self.messages = []

    def commit(self, repo, branch, operations):
        files = dict(self.repos[repo].get(branch, {}))
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "deletedFile":
                del files[value["path"]]
            elif operation["key"] == "header":
                self.messages.append(value["summary"])
        self.repos[repo][branch] = files

    def sha(self, repo, branch):
        listed = sorted(
            (p, hashlib.sha1(c).hexdigest()) for p, c in self.files(repo, branch).items()
        )
        return hashlib.sha1(json.dumps([repo, branch, listed]).encode()).hexdigest()

    def files(self, repo, revision):
        return self.repos[repo][self.branch(repo, revision)]

    def branch(self, repo, revision):
        """Return the branch that a revision names, itself or by its commit."""
        branches = self.repos[repo]
        if revision in branches:
            return revision
        return next((b for b in branches if self.sha(repo, b) == revision), None)


class Answering(BaseHTTPRequestHandler):
    """Answers for a hub."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_):
        pass

    def answer(self, status, body=b"", **headers):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_POST(self):
        body = self.body()
        if self.path == "/api/validate-yaml":  # asked before a card is uploaded
            front = json.loads(body)["content"].split("---")[1]
            known = isinstance(yaml.safe_load(front), dict)
            self.answer(200, {"errors": [] if known else [{"message": front}], "warnings": []})
            return
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer(401, {"error": "Invalid credentials"})
            return
        path = self.path.partition("?")[0]
        if path == "/api/repos/create":
            self.create(json.loads(body))
        elif match := re.fullmatch(r"/api/models/(\w+/\w+)/branch/(\w+)", path):
            self.hub.repos[match[1]].setdefault(match[2], {})
            self.answer(200, {})
        elif match := re.fullmatch(r"/api/models/(\w+/\w+)/preupload/(\w+)", path):
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            self.answer(200, {"files": files})
        elif match := re.fullmatch(r"/api/models/(\w+/\w+)/commit/(\w+)", path):
            self.hub.commit(match[1], match[2], map(json.loads, body.splitlines()))
            address = f"http://{self.headers['Host']}/{match[1]}/commit/{'0' * 40}"
            self.answer(200, {"commitUrl": address, "commitOid": "0" * 40, "success": True})
        else:
            self.answer(404, {"error": self.path})

    def create(self, asked):
        name = f"{asked.get('organization') or 'user'}/{asked['name']}"
        there = name in self.hub.repos
        self.hub.repos.setdefault(name, {"main": {}})
        address = f"http://{self.headers['Host']}/{name}"
        self.answer(409 if there else 200, {"url": address, "name": name})

    def do_GET(self):
        path = self.path.partition("?")[0]
        patterns = {
            r"/api/models/(\w+/\w+)(?:/revision/(\w+))?": self.info,
            r"/api/models/(\w+/\w+)/tree/(\w+)": self.tree,
            r"/(\w+/\w+)/resolve/(\w+)/(.+)": self.resolve,
        }
        for pattern, act in patterns.items():
            if match := re.fullmatch(pattern, path):
                repo, revision = match[1], match[2] or "main"
                if repo not in self.hub.repos:
                    self.answer(404, {"error": "no"}, X_Error_Code="RepoNotFound")
                elif self.hub.branch(repo, revision) is None:
                    self.answer(404, {"error": "no"}, X_Error_Code="RevisionNotFound")
                else:
                    act(repo, revision, *match.groups()[2:])
                return
        self.answer(404, {"error": self.path})

    do_HEAD = do_GET  # noqa: N815 - as http.server calls it

    def info(self, repo, revision):
        branch = self.hub.branch(repo, revision)
        files = [{"rfilename": path} for path in self.hub.files(repo, revision)]
        self.answer(200, {"id": repo, "sha": self.hub.sha(repo, branch), "siblings": files})

    def tree(self, repo, revision):
        self.answer(
            200,
            [
                {"type": "file", "path": path, "size": len(content), "oid": self.oid(content)}
                for path, content in self.hub.files(repo, revision).items()
            ],
        )

    def resolve(self, repo, revision, path):
        content = self.hub.files(repo, revision).get(path)
        if content is None:
            self.answer(404, {"error": "no"}, X_Error_Code="EntryNotFound")
            return
        commit = self.hub.sha(repo, self.hub.branch(repo, revision))
        self.answer(200, content, ETag=f'"{self.oid(content)}"', X_Repo_Commit=commit)

    @staticmethod
    def oid(content):
        return hashlib.sha1(content).hexdigest()


@contextmanager
def stand_in():
    """Run a hub on a port of this machine, and yield it with its address."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("OfHub", (Answering,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def go_online(patch, address, cache):
    """Send all requests to the hub to ``address``, without a token."""
    patch.setattr(constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    patch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    patch.setattr(hub, "HfApi", lambda token: HfApi(endpoint=address, token=token))
    patch.setattr(hub, "get_token", lambda: None)


def log_in(patch):
    """Be somebody who may push."""
    patch.setattr(hub, "get_token", lambda: TOKEN)
    patch.setattr(
        hub, "HfApi", lambda token: HfApi(endpoint=constants.ENDPOINT, token=token or TOKEN)
    )
