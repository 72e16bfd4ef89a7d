"""A model hub on the loopback interface that the real hub client downloads from.

Serves the part of the hub's interface that loading a model needs, from folders on disk, and can be told to misbehave.
"""

import hashlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


@dataclass
class Repository:
    """One model: revisions by commit, branches by name."""

    commits: dict[str, Path]
    branches: dict[str, str]
    gated: int = 0  # status with which the hub refuses, 401 or 403; 0 for an open model
    missing: set[str] = field(default_factory=set)  # listed, but not served


@dataclass
class TestHub:
    """State of the server; tests change it between requests.

    Attributes:
        requests: Method and path of every request so far.
        hang: Take requests and never answer.
        hang_on: Never answer requests for this file.
        broken: Answer everything with this status instead; 0 for normal service.
        gibberish: Answer with a web page, as something that is no hub would.
        slow_s: Pause between two pieces of the weights.
    """

    __test__ = False

    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    hang: bool = False
    hang_on: str = "-"
    broken: int = 0
    gibberish: bool = False
    slow_s: float = 0.0
    url: str = ""
    released: threading.Event = field(default_factory=threading.Event)

    def add(self, name: str, folder: Path, branch: str = "main") -> str:
        """Publish a folder as the tip of a branch; return the commit."""
        commit = hashlib.sha1(f"{name} {branch} {folder}".encode(), usedforsecurity=False).hexdigest()
        repository = self.repositories.setdefault(name, Repository({}, {}))
        repository.commits[commit] = folder
        repository.branches[branch] = commit
        return commit

    def downloads(self) -> list[str]:
        """Return the names of the files that were fetched."""
        return [r.rsplit("/", 1)[1] for r in self.requests if r.startswith("GET ") and "/resolve/" in r]

    # ------------------------------------------------------------------------------------------ answers

    def trouble(self, path: str) -> Response | None:
        if self.hang or path.endswith(self.hang_on):
            self.released.wait(60)
        if self.broken:
            return Response(status_code=self.broken)
        if self.gibberish:
            return Response("<html>Welcome to the hotel</html>", media_type="text/html")
        return None

    def find(self, name: str, revision: str) -> tuple[Repository, str, Path] | Response:
        repository = self.repositories.get(name)
        if repository is None:
            return _error(401, "RepoNotFound", "Invalid username or password.")
        if repository.gated:
            return _error(repository.gated, "GatedRepo", "Access to this model is restricted.")
        commit = repository.branches.get(revision, revision)
        if commit not in repository.commits:
            return _error(404, "RevisionNotFound", "Invalid rev id")
        return repository, commit, repository.commits[commit]

    def info(self, request: Request) -> Response:
        self.requests.append(f"{request.method} {request.url.path}")
        trouble = self.trouble(request.url.path)
        if trouble:
            return trouble
        name, _, revision = request.path_params["rest"].partition("/revision/")
        found = self.find(name, revision or "main")
        if isinstance(found, Response):
            # The real hub names a gated model; only its files are refused.
            repository = self.repositories.get(name)
            if repository is None or not repository.gated:
                return found
            commit = repository.branches["main"]
            found = (repository, commit, repository.commits[commit])
        _, commit, folder = found
        files = sorted(p for p in folder.iterdir() if p.is_file())
        listed = [{"rfilename": p.name, "size": p.stat().st_size, "blobId": _sha(p)} for p in files]
        return JSONResponse({"id": name, "modelId": name, "sha": commit, "siblings": listed, "tags": []})

    def file(self, request: Request) -> Response:
        self.requests.append(f"{request.method} {request.url.path}")
        trouble = self.trouble(request.url.path)
        if trouble:
            return trouble
        name, _, rest = request.path_params["rest"].partition("/resolve/")
        revision, _, filename = rest.partition("/")
        found = self.find(name, revision)
        if isinstance(found, Response):
            return found
        repository, commit, folder = found
        path = folder / filename
        if not path.is_file() or filename in repository.missing:
            return _error(404, "EntryNotFound", "Entry not found", commit)
        headers = {
            "ETag": f'"{_sha(path)}"',
            "X-Repo-Commit": commit,
            "Content-Length": str(path.stat().st_size),
            "Accept-Ranges": "bytes",
        }
        if request.method == "HEAD":
            return Response(headers=headers)
        return StreamingResponse(self.pieces(path), headers=headers)

    def pieces(self, path: Path) -> Iterator[bytes]:
        data = path.read_bytes()
        size = max(1, len(data) // 20) if self.slow_s and path.suffix == ".safetensors" else max(1, len(data))
        for start in range(0, len(data), size):
            yield data[start : start + size]
            if size < len(data):
                time.sleep(self.slow_s)


def _sha(path: Path) -> str:
    return hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest()


def _error(status: int, code: str, message: str, commit: str = "") -> Response:
    headers = {"X-Error-Code": code, "X-Error-Message": message}
    if commit:
        headers["X-Repo-Commit"] = commit
    return JSONResponse({"error": message}, status_code=status, headers=headers)


@contextmanager
def serve_hub() -> Iterator[TestHub]:
    """Run a hub in a thread on a free port."""
    hub = TestHub()
    routes = [
        Route("/api/models/{rest:path}", hub.info, methods=["GET"]),
        Route("/{rest:path}", hub.file, methods=["GET", "HEAD"]),
    ]
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(Starlette(routes=routes), log_level="error", lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    hub.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        yield hub
    finally:
        hub.released.set()
        server.should_exit = True
        thread.join(10)
        listener.close()


@contextmanager
def black_hole() -> Iterator[str]:
    """Yield the address of a server that accepts connections into its backlog and never says a word."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=16)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()


def closed_port() -> str:
    """Return an address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    return f"http://127.0.0.1:{port}"
