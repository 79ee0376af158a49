"""A Hub on this machine: the part of the Hugging Face Hub's protocol that its client speaks for models and Spaces.

Two servers on the loopback, as there are two hosts in reality: the Hub itself, and the storage of large files, where
the client goes with a signed address and without its token. The server counts every hash itself, so that it is a check
of the client independent of it; whatever it is asked that it does not know, or sent that it should not have been sent,
is an error when it is closed. Learnt from the requests that `huggingface_hub` makes.

    with HubServer(tokens={"secret": "user"}) as hub:
        environment = hub.environment(tmp_path, token="secret")
        subprocess.run([sys.executable, "-c", "..."], env=environment)
        assert set(hub.files("user/name")) == {"config.json", ...}

`hub_client.HubClient` keeps an interpreter in such an environment.
"""

from __future__ import annotations

import base64
import contextlib
import fnmatch
import hashlib
import hmac
import json
import os
import re
import secrets
import socket
import threading
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import ceil
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, parse_qsl, quote, unquote, urlencode, urlsplit

import yaml


LARGE_FILE_BYTES = 10 * 2**20  # from here on a file goes to the storage whatever its name
LARGE_FILE_PATTERNS = [
    f"*.{ending}"
    for ending in (
        *("7z", "arrow", "bin", "bz2", "ckpt", "gz", "h5", "joblib", "model", "msgpack", "npy", "npz", "onnx"),
        *("parquet", "pickle", "pkl", "pt", "pth", "safetensors", "tar", "tflite", "tgz", "xz", "zip", "zst"),
    )
] + ["*tfevents*"]
GIT_ATTRIBUTES = "".join(f"{pattern} filter=lfs diff=lfs merge=lfs -text\n" for pattern in LARGE_FILE_PATTERNS)

INVALID_TOKEN = "Invalid credentials in Authorization header"
ANONYMOUS = "Invalid username or password."


def namespace_of(repo: str) -> str:
    """The user or the organization that a repository belongs to."""
    return repo.removeprefix("spaces/").split("/")[0]


def git_blob_id(content: bytes) -> str:
    """What git calls a file of this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def lfs_pointer(sha256: str, size: int) -> bytes:
    """What git holds of a file whose content is in the storage."""
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()


# ---------------------------------------------------------------------------------------------------------------------
# What the server holds
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class File:
    """One file at one commit: `content` is None where it lies in the storage under `sha256`."""

    size: int
    content: bytes | None = None
    sha256: str | None = None

    @property
    def blob_id(self) -> str:
        """Its name in git."""
        return git_blob_id(lfs_pointer(self.sha256, self.size) if self.content is None else self.content)

    @property
    def etag(self) -> str:
        """What the cache of the client goes by."""
        return self.sha256 or self.blob_id

    @property
    def lfs(self) -> dict[str, Any] | None:
        """Description of a file in the storage, None for any other."""
        if self.sha256 is None:
            return None
        pointer_size = len(lfs_pointer(self.sha256, self.size))
        return {"oid": self.sha256, "sha256": self.sha256, "size": self.size, "pointerSize": pointer_size}


@dataclass(frozen=True)
class Commit:
    """All files at one moment, and who wrote them."""

    files: Mapping[str, File]
    parent: str | None
    title: str
    message: str
    author: str
    date: str

    @property
    def id(self) -> str:
        """40 hexadecimal digits that depend on everything in it."""
        tree = {path: file.blob_id for path, file in sorted(self.files.items())}
        parts = [tree, self.parent, self.title, self.message, self.author, self.date]
        return hashlib.sha1(json.dumps(parts).encode()).hexdigest()


@dataclass
class Repository:
    """One model repository."""

    id: str
    private: bool = False
    gated: bool | str = False
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    pull_requests: dict[str, str] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)  # the storage, by SHA-256
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)  # parts of files on their way there
    created: str = field(default_factory=lambda: now())

    def head_of(self, ref: str) -> dict[str, str]:
        """The table that holds a branch or a pull request of this name."""
        return self.pull_requests if ref.startswith("refs/pr/") else self.branches

    def resolve(self, revision: str) -> Commit | None:
        """The commit of a branch, tag, pull request or (abbreviated) hash; None if there is none."""
        revision = revision.removeprefix("refs/heads/")
        for table in (self.branches, self.tags, self.pull_requests):
            if revision in table:
                return self.commits[table[revision]]
        if re.fullmatch(r"[0-9a-f]{7,40}", revision):
            found = [commit for name, commit in self.commits.items() if name.startswith(revision)]
            return found[0] if len(found) == 1 else None
        return None

    def add(self, ref: str, files: Mapping[str, File], title: str, message: str, author: str) -> Commit:
        """Puts a commit on top of a branch or pull request."""
        parent = self.head_of(ref).get(ref)
        commit = Commit(dict(files), parent, title, message, author, now())
        self.commits[commit.id] = commit
        self.head_of(ref)[ref] = commit.id
        return commit

    def history(self, commit: Commit) -> list[Commit]:
        """The commit and those before it, newest first."""
        found = [commit]
        while (parent := found[-1].parent) is not None:
            found.append(self.commits[parent])
        return found

    def content(self, file: File) -> bytes:
        """The bytes, wherever they lie."""
        return self.objects[file.sha256] if file.content is None else file.content


def now() -> str:
    """The time as the Hub writes it."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


# ---------------------------------------------------------------------------------------------------------------------
# What the server says and what it notes
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Request:
    """One line of the server's log; `status` is None where the connection was dropped before an answer."""

    method: str
    path: str
    user: str | None = None
    status: int | None = None
    received: int = 0  # bytes of the body, as far as it came
    sent: int = 0  # bytes of the answer's body
    range: str | None = None


@dataclass
class Fault:
    """What goes wrong with the next `times` requests that fit; see the methods of `HubServer`."""

    kind: str
    method: str
    path: re.Pattern[str]
    times: int
    status: int = 503
    after: int = 0


@dataclass
class Answer:
    """A response before it is sent."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def json(cls, value: Any, status: int = 200, **headers: str) -> Answer:
        """An answer in JSON."""
        return cls(json.dumps(value).encode(), status, {"Content-Type": "application/json", **headers})


class HubError(Exception):
    """An answer that refuses, with the headers that the client tells errors apart by."""

    def __init__(self, status: int, message: str, code: str | None = None, **headers: str):
        super().__init__(message)
        self.status, self.message, self.code, self.headers = status, message, code, headers

    def answer(self) -> Answer:
        """The response."""
        headers = {"X-Error-Message": self.message, **self.headers}
        if self.code is not None:
            headers["X-Error-Code"] = self.code
        return Answer.json({"error": self.message}, self.status, **headers)


class HubServer:
    """The server; a context manager, within which it runs.

    Args:
        tokens: The user of each token.
        read_only: Tokens that may read, but not write.
        organizations: Members of each organization.
        part_bytes: Files larger than this are uploaded in parts of so many bytes; None means in one piece.
        page_size: Entries of a listing in one answer.

    Attributes:
        url: The address, for `HF_ENDPOINT`.
        repositories: `Repository` by name.
        log: Every request, in the order in which they came; see `requests`.
        unexpected: What the client should not have sent or what this server could not answer. Not empty means an
            AssertionError when the server is closed.
    """

    def __init__(
        self,
        tokens: Mapping[str, str] | None = None,
        *,
        read_only: tuple[str, ...] = (),
        organizations: Mapping[str, tuple[str, ...]] | None = None,
        part_bytes: int | None = None,
        page_size: int = 1000,
    ):
        self.tokens = dict(tokens or {})
        self.read_only = read_only
        self.organizations = dict(organizations or {})
        self.part_bytes = part_bytes
        self.page_size = page_size
        self.repositories: dict[str, Repository] = {}
        self.log: list[Request] = []
        self.unexpected: list[str] = []
        self.lock = threading.RLock()
        self._faults: list[Fault] = []
        self._key = secrets.token_bytes(16)
        self._servers: list[ThreadingHTTPServer] = []

    def __enter__(self) -> HubServer:
        for handler in (HubHandler, StorageHandler):
            server = ThreadingHTTPServer(("127.0.0.1", 0), type(handler.__name__, (handler,), {"hub": self}))
            server.daemon_threads, server.block_on_close = True, False
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
            self._servers.append(server)
        return self

    def __exit__(self, error_type: Any, *_: Any) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()
        self._servers.clear()
        if error_type is None and self.unexpected:
            raise AssertionError("unexpected requests:\n" + "\n".join(self.unexpected))

    @property
    def url(self) -> str:
        """Address of the Hub."""
        return f"http://127.0.0.1:{self._servers[0].server_port}"

    @property
    def storage_url(self) -> str:
        """Address of the storage, by another name: to some clients another port alone is still the same host."""
        return f"http://localhost:{self._servers[1].server_port}"

    def environment(self, folder: str | os.PathLike[str], token: str | None = None, **more: str) -> dict[str, str]:
        """The environment of a process whose Hub this is.

        Args:
            folder: Its home: cache, token and modules; another folder means a fresh cache.
            token: What it is logged in with; None means not at all.
            more: Further variables.
        """
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.lower().endswith("_proxy") and not name.startswith(("HF_", "HUGGING"))
        }
        home = Path(folder)
        home.mkdir(parents=True, exist_ok=True)
        environment |= {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home / "hf_home"),
            "HF_HUB_OFFLINE": "0",
            "TRANSFORMERS_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",  # a protocol of its own, in compiled code, that speaks to hosts of its own
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
        }
        if token is not None:
            environment["HF_TOKEN"] = token
        return environment | more

    # What tests ask and prepare ----------------------------------------------------------------------------------

    def add_repository(
        self, repo_id: str, files: Mapping[str, bytes] | None = None, *, private: bool = False
    ) -> Repository:
        """A repository made behind the client's back, with the Hub's first commit and, if given, one with `files`."""
        with self.lock:
            repository = self.repositories[repo_id] = Repository(repo_id, private)
            first = {".gitattributes": File(len(GIT_ATTRIBUTES), GIT_ATTRIBUTES.encode())}
            repository.add("main", first, "initial commit", "", "system")
            if files:
                self.add_commit(repo_id, files)
            return repository

    def add_commit(self, repo_id: str, files: Mapping[str, bytes], revision: str = "main") -> Commit:
        """A commit made behind the client's back."""
        with self.lock:
            repository = self.repositories[repo_id]
            merged = dict(repository.resolve(revision).files)
            for path, content in files.items():
                sha256 = hashlib.sha256(content).hexdigest()
                if is_large(merged, path, len(content), content[:512]):
                    repository.objects[sha256] = content
                    merged[path] = File(len(content), sha256=sha256)
                else:
                    merged[path] = File(len(content), content)
            return repository.add(revision, merged, "commit", "", "system")

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """Every file's content, but for the .gitattributes that the Hub itself writes."""
        with self.lock:
            repository = self.repositories[repo_id]
            commit = repository.resolve(revision)
            assert commit is not None, f"{repo_id} has no revision {revision}"
            return {path: repository.content(file) for path, file in commit.files.items() if path != ".gitattributes"}

    def history(self, repo_id: str, revision: str = "main") -> list[Commit]:
        """Commits, newest first."""
        with self.lock:
            repository = self.repositories[repo_id]
            return repository.history(repository.resolve(revision))

    def requests(self, method: str = "", path: str = "") -> list[Request]:
        """The log's lines of this method and of a path in which the regular expression is found."""
        with self.lock:
            return [each for each in self.log if method in ("", each.method) and re.search(path, each.path)]

    def uploaded_bytes(self) -> int:
        """Bytes of large files that came to the storage, those of broken uploads included."""
        return sum(each.received for each in self.requests("PUT", "^/storage/"))

    # What goes wrong ---------------------------------------------------------------------------------------------

    def refuse(self, method: str, path: str, *, status: int = 503, times: int = 1) -> Fault:
        """The next requests are answered with a server's error, and nothing is done."""
        return self._inject(Fault("refuse", method, re.compile(path), times, status))

    def drop_upload(self, path: str = "^/storage/", *, after: int, times: int = 1, method: str = "PUT") -> Fault:
        """The connection of the next uploads breaks when so many bytes have come."""
        return self._inject(Fault("drop", method, re.compile(path), times, after=after))

    def cut_download(self, path: str = "^/storage/", *, after: int, times: int = 1) -> Fault:
        """The next downloads end after so many bytes of the body."""
        return self._inject(Fault("cut", "GET", re.compile(path), times, after=after))

    def lose_answer(self, method: str, path: str, *, times: int = 1) -> Fault:
        """The next requests are carried out, but the client never hears of it."""
        return self._inject(Fault("lose", method, re.compile(path), times))

    def forget_faults(self) -> None:
        """All is well again."""
        with self.lock:
            self._faults.clear()

    def _inject(self, fault: Fault) -> Fault:
        with self.lock:
            self._faults.append(fault)
        return fault

    def take_fault(self, method: str, path: str) -> Fault | None:
        """The fault that befalls this request, which is then one less to come."""
        with self.lock:
            for fault in self._faults:
                if fault.times > 0 and fault.method == method and fault.path.search(path):
                    fault.times -= 1
                    return fault
            return None

    # Rights ------------------------------------------------------------------------------------------------------

    def is_member(self, user: str | None, namespace: str) -> bool:
        """Whether the user may write there (given a token that may)."""
        return user is not None and (user == namespace or user in self.organizations.get(namespace, ()))

    def sign(self, method: str, path: str) -> str:
        """What lets whoever has it do one thing in the storage."""
        return hmac.new(self._key, f"{method} {path}".encode(), "sha256").hexdigest()

    def signed(self, server: str, method: str, path: str, **query: str) -> str:
        """An address that works without a token."""
        return f"{server}{path}?{urlencode({**query, 'X-Amz-Signature': self.sign(method, path)})}"


def is_large(files: Mapping[str, File], path: str, size: int, sample: bytes) -> bool:
    """Whether a file belongs into the storage: by the repository's .gitattributes, by its size, or as no text."""
    attributes = files.get(".gitattributes")
    lines = (attributes.content or b"").decode().splitlines() if attributes else []
    patterns = [line.split()[0] for line in lines if "filter=lfs" in line]
    by_name = any(fnmatch.fnmatch(path, each) or fnmatch.fnmatch(path.split("/")[-1], each) for each in patterns)
    return by_name or size > LARGE_FILE_BYTES or b"\0" in sample


# ---------------------------------------------------------------------------------------------------------------------
# The metadata of a model card
# ---------------------------------------------------------------------------------------------------------------------


def card_metadata(content: str) -> Any:
    """The YAML at the start of a README.md; None without any. Raises yaml.YAMLError."""
    match = re.match(r"\s*---\r?\n(.*?)\r?\n?---\s*(?:\r?\n|$)", content, re.DOTALL)
    return yaml.safe_load(match.group(1)) if match else None


def card_errors(content: str, in_space: bool = False) -> list[str]:
    """What the Hub would not accept in a card's metadata: wrong types, and names that cannot be."""
    try:
        data = card_metadata(content)
    except yaml.YAMLError as error:
        return [f"bad YAML: {error}"]
    if data is None:
        return []
    if not isinstance(data, dict):
        return ["the metadata must be a mapping"]
    errors = space_errors(data) if in_space else []
    repository = r"[\w-][\w.-]*(/[\w-][\w.-]*)?"
    shapes = {
        "language": r"[a-z]{2,3}(-[A-Za-z]+)*|code|multilingual",
        "license": r"[a-z0-9][a-z0-9.-]*",
        "base_model": repository,
        "datasets": repository,
        "metrics": r".+",
        "tags": r".+",
        "pipeline_tag": r"[a-z0-9-]+",
        "library_name": r"[\w.-]+",
    }
    single = {"pipeline_tag", "library_name"}
    lists_only = {"tags"}
    for key, shape in shapes.items():
        if data.get(key) is None:
            continue
        values = data[key] if isinstance(data[key], list) else [data[key]]
        if (key in single and isinstance(data[key], list)) or (key in lists_only and not isinstance(data[key], list)):
            errors.append(f'"{key}" must {"not " if key in single else ""}be a list')
        for value in values:
            if not isinstance(value, str):
                errors.append(f'"{key}" must be a string, not {value!r}')
            elif not re.fullmatch(shape, value):
                errors.append(f'"{key}" with value "{value}" is not valid')
    return errors + model_index_errors(data.get("model-index"))


def space_errors(data: dict[str, Any]) -> list[str]:
    """What a Space cannot be started with."""
    errors = [f'"{key}" is required' for key in ("sdk",) if key not in data]
    if data.get("sdk") not in ("gradio", "docker", "static", None):
        errors.append(f'"sdk" cannot be {data["sdk"]!r}')
    for key, shape in {"sdk_version": r"\d+\.\d+\.\d+", "app_file": r".+", "emoji": r"\W+", "title": r".+"}.items():
        if key in data and not (isinstance(data[key], str) and re.fullmatch(shape, data[key])):
            errors.append(f'"{key}" with value {data[key]!r} is not valid')
    if len(str(data.get("short_description", ""))) > 60:
        errors.append('"short_description" is longer than 60 characters')
    colors = {"red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray"}
    return errors + [f'"{key}" is no color' for key in ("colorFrom", "colorTo") if data.get(key, "red") not in colors]


def model_index_errors(index: Any) -> list[str]:
    """What is wrong with the figures of a card."""
    if index is None:
        return []
    try:
        for model in index:
            if not isinstance(model["name"], str):
                return ['"model-index[].name" must be a string']
            for result in model["results"]:
                for part, keys in {"task": ["type"], "dataset": ["type", "name"]}.items():
                    for key in keys:
                        if not isinstance(result[part][key], str):
                            return [f'"model-index[].results[].{part}.{key}" must be a string']
                for metric in result["metrics"]:
                    if not isinstance(metric["type"], str) or metric["value"] is None:
                        return ['"model-index[].results[].metrics[]" must have a type and a value']
    except (KeyError, TypeError) as error:
        return [f'"model-index" is incomplete: {type(error).__name__}: {error}']
    return []


# ---------------------------------------------------------------------------------------------------------------------
# HTTP
# ---------------------------------------------------------------------------------------------------------------------


class Dropped(Exception):
    """The connection is gone, on purpose or by the client."""


class Handler(BaseHTTPRequestHandler):
    """Reads a request, finds its route, answers and writes the log."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = 120
    hub: HubServer
    routes: tuple[tuple[str, str, str], ...] = ()

    def log_message(self, *_: Any) -> None:
        """Nothing on the console."""

    def handle(self) -> None:
        """All requests of a connection."""
        with contextlib.suppress(ConnectionError, TimeoutError):
            super().handle()

    def answer(self) -> None:
        """One request."""
        split = urlsplit(self.path)
        self.raw_path, self.query = split.path, {k: v[-1] for k, v in parse_qs(split.query).items()}
        self.entry = Request(self.command, unquote(split.path), range=self.headers.get("Range"))
        with self.hub.lock:  # before the answer, which the test may be waiting for
            self.hub.log.append(self.entry)
        fault = self.hub.take_fault(self.command, self.entry.path)
        try:
            self.body = self.read_body(fault)
            if fault is not None and fault.kind == "refuse":
                reply = HubError(fault.status, "Internal Error").answer()
            else:
                reply = self.route()
            if fault is not None and fault.kind == "lose":
                raise Dropped
            self.send(reply, cut_after=fault.after if fault is not None and fault.kind == "cut" else None)
        except (Dropped, ConnectionError):
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = answer

    def read_body(self, fault: Fault | None) -> bytes:
        """The body, as far as a fault lets it come."""
        if self.headers.get("Transfer-Encoding") is not None:
            self.close_connection = True
            self.hub.unexpected.append(f"{self.command} {self.path}: a body without Content-Length")
            return b""
        length = int(self.headers.get("Content-Length") or 0)
        limit = fault.after if fault is not None and fault.kind == "drop" else length
        body = b""
        while len(body) < min(limit, length):
            piece = self.rfile.read(min(2**16, min(limit, length) - len(body)))
            if not piece:
                break
            body += piece
            self.entry.received = len(body)
        if len(body) < length or (fault is not None and fault.kind == "drop"):
            raise Dropped
        return body

    def route(self) -> Answer:
        """The answer of whoever is in charge of this path."""
        try:
            for methods, pattern, name in self.routes:
                # The API has spaces/user/name in the place of models/user/name.
                match = re.fullmatch(pattern, self.raw_path.replace("/api/spaces/", "/api/models/spaces/", 1))
                if match and self.command in methods.split("|"):
                    with self.hub.lock:
                        parts = {key: unquote(value) for key, value in match.groupdict("").items()}
                        return getattr(self, name)(**parts)
            self.hub.unexpected.append(f"{self.command} {self.path}: no such route")
            raise HubError(404, "Sorry, we can't find the page you are looking for.")
        except HubError as error:
            return error.answer()
        except Exception:
            self.hub.unexpected.append(f"{self.command} {self.path}: {traceback.format_exc()}")
            return HubError(500, "the test's server broke").answer()

    def send(self, reply: Answer, cut_after: int | None = None) -> None:
        """Writes the answer; a HEAD has no body."""
        self.entry.status = reply.status
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        body = b"" if self.command == "HEAD" else reply.body
        if cut_after is not None:
            body = body[:cut_after]
        self.entry.sent = len(body)
        self.wfile.write(body)
        if cut_after is not None:
            raise Dropped

    def json_body(self) -> Any:
        """The body of a request in JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            raise HubError(400, "Invalid JSON") from None

    def content(self, content: bytes, **headers: str) -> Answer:
        """The bytes of a file, or the range of them that was asked for."""
        headers |= {"Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range") or "")
        if not asked or not any(asked.groups()):
            return Answer(content, 200, headers)
        first, last = asked.groups()
        start = int(first) if first else max(0, len(content) - int(last))
        stop = min(len(content), int(last) + 1) if first and last else len(content)
        if start >= stop:
            return Answer(b"", 416, {"Content-Range": f"bytes */{len(content)}"})
        return Answer(
            content[start:stop], 206, headers | {"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"}
        )


# A Space's name begins with spaces/ here, in its addresses and in `HubServer.repositories`.
REPOSITORY = r"(?P<repo>(?:spaces/)?[\w.-]+/[\w.-]+)"
API = rf"/api/models/{REPOSITORY}"


class StorageHandler(Handler):
    """The storage of large files: signed addresses only, and no tokens."""

    routes = (
        ("GET|HEAD", rf"/storage/{REPOSITORY}/(?P<oid>[0-9a-f]{{64}})", "download"),
        ("PUT", rf"/storage/{REPOSITORY}/(?P<oid>[0-9a-f]{{64}})", "upload"),
        ("PUT", rf"/storage/{REPOSITORY}/(?P<oid>[0-9a-f]{{64}})/(?P<upload>\w+)/(?P<part>\d+)", "upload_part"),
    )

    def check_signature(self) -> None:
        """Refuses who was not sent here by the Hub, and who brings the token along."""
        if "Authorization" in self.headers:
            self.hub.unexpected.append(f"{self.command} {self.path}: the token was sent to the storage")
            raise HubError(400, "Only one auth mechanism allowed")
        method = "GET" if self.command == "HEAD" else self.command
        if not hmac.compare_digest(self.query.get("X-Amz-Signature", ""), self.hub.sign(method, self.raw_path)):
            raise HubError(403, "SignatureDoesNotMatch")

    def download(self, repo: str, oid: str) -> Answer:
        """A whole file or a range of it."""
        self.check_signature()
        return self.content(self.hub.repositories[repo].objects[oid], ETag=f'"{oid}"')

    def upload(self, repo: str, oid: str) -> Answer:
        """A whole file, which must be what its address says."""
        self.check_signature()
        self.check_hash(self.body, oid)
        self.hub.repositories[repo].objects[oid] = self.body
        return Answer(headers={"ETag": f'"{hashlib.md5(self.body).hexdigest()}"'})

    def upload_part(self, repo: str, oid: str, upload: str, part: str) -> Answer:
        """A part of a file."""
        self.check_signature()
        self.hub.repositories[repo].uploads[upload][int(part)] = self.body
        return Answer(headers={"ETag": f'"{hashlib.md5(self.body).hexdigest()}"'})

    def check_hash(self, content: bytes, oid: str) -> None:
        """Refuses what is not the file that was announced."""
        if hashlib.sha256(content).hexdigest() != oid:
            self.hub.unexpected.append(f"{self.command} {self.path}: content is not that of the hash")
            raise HubError(400, "BadDigest")


class HubHandler(StorageHandler):
    """The Hub itself."""

    routes = (
        ("GET", r"/api/whoami-v2", "whoami"),
        ("POST", r"/api/validate-yaml", "validate_yaml"),
        ("POST", r"/api/repos/create", "create"),
        ("DELETE", r"/api/repos/delete", "delete"),
        ("GET|HEAD", rf"/api/resolve-cache/models/{REPOSITORY}/(?P<rev>[0-9a-f]{{40}})/(?P<path>.+)", "serve"),
        ("GET", API, "info"),
        ("GET", rf"{API}/revision/(?P<rev>[^/]+)", "info"),
        ("GET", r"/api/models/(?P<repo>[\w.-]+)(?:/revision/(?P<rev>[^/]+))?", "info"),  # names without a namespace
        ("GET|HEAD", r"/(?P<repo>[\w.-]+)/resolve/(?P<rev>[^/]+)/(?P<path>.+)", "resolve"),
        ("PUT", rf"{API}/settings", "settings"),
        ("GET", rf"{API}/discussions", "discussions"),
        ("GET", rf"{API}/refs", "refs"),
        ("GET", rf"{API}/commits/(?P<rev>[^/]+)", "commits"),
        ("GET", rf"{API}/tree/(?P<rev>[^/]+)(?:/(?P<path>[^/]+))?", "tree"),
        ("POST", rf"{API}/paths-info/(?P<rev>[^/]+)", "paths_info"),
        ("POST|DELETE", rf"{API}/branch/(?P<name>[^/]+)", "branch"),
        ("POST|DELETE", rf"{API}/tag/(?P<name>[^/]+)", "tag"),
        ("POST", rf"{API}/preupload/(?P<rev>[^/]+)", "preupload"),
        ("POST", rf"{API}/commit/(?P<rev>[^/]+)", "commit"),
        ("POST", rf"/{REPOSITORY}\.git/info/lfs/objects/batch", "lfs_batch"),
        ("POST", rf"/{REPOSITORY}\.git/info/lfs/objects/verify", "lfs_verify"),
        ("POST", rf"/complete/{REPOSITORY}/(?P<oid>[0-9a-f]{{64}})/(?P<upload>\w+)", "lfs_complete"),
        ("GET|HEAD", rf"/{REPOSITORY}/resolve/(?P<rev>[^/]+)/(?P<path>.+)", "resolve"),
    )

    # Who may what ------------------------------------------------------------------------------------------------

    def user(self) -> str | None:
        """Who asks; None for nobody in particular. A token that nobody has is refused everywhere."""
        header = self.headers.get("Authorization")
        if header is None:
            return None
        token = header.removeprefix("Bearer ")
        if token not in self.hub.tokens:
            raise HubError(401, INVALID_TOKEN)
        self.entry.user = self.hub.tokens[token]
        return self.entry.user

    def check_may_write(self, namespace: str, refusal: str) -> str:
        """The user, who may write into this namespace."""
        user = self.user()
        if user is None:
            raise HubError(401, ANONYMOUS)
        token = self.headers["Authorization"].removeprefix("Bearer ")
        if not self.hub.is_member(user, namespace) or token in self.hub.read_only:
            raise HubError(403, refusal)
        return user

    def readable(self, repo: str) -> Repository:
        """A repository that the user may know of: to others a private one is as good as missing."""
        user = self.user()
        repository = self.hub.repositories.get(repo)
        if repository is None or (repository.private and not self.hub.is_member(user, namespace_of(repo))):
            if user is None:
                raise HubError(401, ANONYMOUS, "RepoNotFound")
            raise HubError(404, "Repository not found", "RepoNotFound")
        return repository

    def writable(self, repo: str) -> Repository:
        """A repository that the user may write to."""
        repository = self.readable(repo)
        self.check_may_write(namespace_of(repo), "Forbidden: you must use a write token to upload to a repository.")
        return repository

    def commit_at(self, repository: Repository, revision: str) -> Commit:
        """The commit of a revision."""
        commit = repository.resolve(revision)
        if commit is None:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit

    # Accounts and repositories -----------------------------------------------------------------------------------

    def whoami(self) -> Answer:
        """Whose token it is."""
        user = self.user()
        if user is None:
            raise HubError(401, ANONYMOUS)
        token = self.headers["Authorization"].removeprefix("Bearer ")
        role = "read" if token in self.hub.read_only else "write"
        return Answer.json(
            {
                "type": "user",
                "id": git_blob_id(user.encode())[:24],
                "name": user,
                "fullname": user,
                "orgs": [
                    {"type": "org", "name": name, "roleInOrg": "write"}
                    for name, members in self.hub.organizations.items()
                    if user in members
                ],
                "auth": {"type": "access_token", "accessToken": {"displayName": "test", "role": role}},
            }
        )

    def validate_yaml(self) -> Answer:
        """Whether a model card will be accepted."""
        asked = self.json_body()
        content, in_space = asked["content"], asked.get("repoType") == "space"
        errors = [{"message": message} for message in card_errors(content, in_space)]
        empty = not errors and card_metadata(content) is None
        warnings = [{"message": "empty or missing yaml metadata in repo card"}] if empty else []
        return Answer.json({"errors": errors, "warnings": warnings}, 400 if errors else 200)

    def create(self) -> Answer:
        """Makes a repository."""
        asked = self.json_body()
        user = self.user()
        namespace = asked.get("organization") or user or "nobody"
        repo_id = f"{namespace}/{asked['name']}"
        self.check_may_write(
            namespace, f'You don\'t have the rights to create a model under the namespace "{namespace}"'
        )
        if asked.get("type", "model") not in ("model", "space"):
            raise HubError(400, "only models and Spaces here")
        if asked.get("type") == "space":
            if not asked.get("sdk"):
                raise HubError(400, "a Space needs an sdk")
            repo_id = f"spaces/{repo_id}"
        url = f"{self.hub.url}/{repo_id}"
        if repo_id in self.hub.repositories:
            return Answer.json({"error": "You already created this model repo", "url": url}, 409)
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        self.hub.add_repository(repo_id, private=private)
        return Answer.json({"url": url, "name": repo_id, "private": private})

    def delete(self) -> Answer:
        """Removes a repository and all that is in it."""
        asked = self.json_body()
        repo_id = f"{asked.get('organization') or self.user()}/{asked['name']}"
        self.writable(repo_id)
        del self.hub.repositories[repo_id]
        return Answer()

    def settings(self, repo: str) -> Answer:
        """Who may see it."""
        repository, asked = self.writable(repo), self.json_body()
        if "visibility" in asked or "private" in asked:
            repository.private = asked.get("visibility") == "private" or bool(asked.get("private"))
        repository.gated = asked.get("gated", repository.gated)
        return Answer.json({"private": repository.private, "gated": repository.gated})

    def discussions(self, repo: str) -> Answer:
        """None are ever held here."""
        self.readable(repo)
        return Answer.json({"discussions": [], "count": 0, "start": 0})

    # Reading -----------------------------------------------------------------------------------------------------

    def info(self, repo: str, rev: str = "") -> Answer:
        """What there is to know of a repository at a revision."""
        repository = self.readable(repo)
        commit = self.commit_at(repository, rev or "main")
        siblings: list[dict[str, Any]] = []
        with_details = self.query.get("blobs", "").lower() in ("true", "1")
        for path, file in sorted(commit.files.items()):
            detail = {"size": file.size, "blobId": file.blob_id} | ({"lfs": file.lfs} if file.lfs else {})
            siblings.append({"rfilename": path} | (detail if with_details else {}))
        readme = commit.files.get("README.md")
        card = card_metadata(repository.content(readme).decode()) if readme else None
        card = card if isinstance(card, dict) else {}
        return Answer.json(
            {
                "_id": git_blob_id(repo.encode())[:24],
                "id": repo.removeprefix("spaces/"),
                "modelId": repo.removeprefix("spaces/"),
                "author": namespace_of(repo),
                "sha": commit.id,
                "private": repository.private,
                "gated": repository.gated,
                "disabled": False,
                "downloads": 0,
                "likes": 0,
                "tags": card.get("tags") or [],
                **{key: card[key] for key in ("pipeline_tag", "library_name") if key in card},
                "cardData": card,
                "siblings": siblings,
                "createdAt": repository.created,
                "lastModified": commit.date,
            }
        )

    def refs(self, repo: str) -> Answer:
        """Branches and tags."""
        repository = self.readable(repo)
        kinds = {
            "branches": ("refs/heads/", repository.branches),
            "tags": ("refs/tags/", repository.tags),
            "converts": ("", {}),
        }
        if self.query.get("include_prs"):
            kinds["pullRequests"] = ("", repository.pull_requests)
        return Answer.json(
            {
                kind: [{"name": name, "ref": prefix + name, "targetCommit": oid} for name, oid in table.items()]
                for kind, (prefix, table) in kinds.items()
            }
        )

    def commits(self, repo: str, rev: str) -> Answer:
        """History, newest first."""
        repository = self.readable(repo)
        return self.page(
            [
                {
                    "id": commit.id,
                    "title": commit.title,
                    "message": commit.message,
                    "date": commit.date,
                    "authors": [{"user": commit.author}],
                }
                for commit in repository.history(self.commit_at(repository, rev))
            ]
        )

    def page(self, entries: list[Any]) -> Answer:
        """One page of a listing, and the address of the next."""
        start = int(self.query.get("cursor", 0))
        stop = start + self.hub.page_size
        headers = {}
        if stop < len(entries):
            query = urlencode({**self.query, "cursor": str(stop)})
            headers["Link"] = f'<{self.hub.url}{self.raw_path}?{query}>; rel="next"'
        return Answer.json(entries[start:stop], **headers)

    def tree(self, repo: str, rev: str, path: str = "") -> Answer:
        """Files and folders in a folder, or in all folders below it."""
        repository = self.readable(repo)
        commit = self.commit_at(repository, rev)
        prefix = f"{path}/" if path else ""
        inside = [name for name in commit.files if name.startswith(prefix)]
        if path and not inside:
            raise HubError(404, f"{path} does not exist on {rev}", "EntryNotFound", **{"X-Repo-Commit": commit.id})
        names = set(inside) | {name.rsplit("/", n)[0] for name in inside for n in range(1, name.count("/") + 1)}
        names = {name for name in names if name.startswith(prefix)}
        if self.query.get("recursive", "").lower() not in ("true", "1"):
            names = {name for name in names if "/" not in name.removeprefix(prefix)}
        return self.page([describe(commit, name) for name in sorted(names)])

    def paths_info(self, repo: str, rev: str) -> Answer:
        """The files and folders of these names, as far as they exist."""
        commit = self.commit_at(self.readable(repo), rev)
        if self.headers.get("Content-Type", "").startswith("application/json"):
            paths = self.json_body()["paths"]
        else:
            paths = [value for name, value in parse_qsl(self.body.decode()) if name == "paths"]
        known = [path for path in paths if any(f"{name}/".startswith(f"{path}/") for name in commit.files)]
        return Answer.json([describe(commit, path) for path in known])

    def resolve(self, repo: str, rev: str, path: str) -> Answer:
        """Where the content of a file is to be had: here for a small one, in the storage for a large one."""
        repository = self.readable(repo)
        if repository.gated and not self.hub.is_member(self.entry.user, namespace_of(repo)):
            message = f"Access to model {repo} is restricted and you are not in the authorized list."
            raise HubError(403 if self.entry.user else 401, message, "GatedRepo")
        commit = self.commit_at(repository, rev)
        file = self.file_at(commit, path)
        headers = {
            "X-Repo-Commit": commit.id,
            "X-Linked-Etag": f'"{file.etag}"',
            "X-Linked-Size": str(file.size),
            "ETag": f'"{file.etag}"',
        }
        if file.sha256 is not None:
            place = self.hub.signed(self.hub.storage_url, "GET", f"/storage/{repo}/{file.sha256}")
            return Answer(b"", 302, {**headers, "Location": place})
        place = f"/api/resolve-cache/models/{repo}/{commit.id}/{quote(path)}"
        return Answer(b"", 307, {**headers, "Location": place})

    def serve(self, repo: str, rev: str, path: str) -> Answer:
        """A small file."""
        commit = self.commit_at(self.readable(repo), rev)
        file = self.file_at(commit, path)
        return self.content(file.content, **{"X-Repo-Commit": commit.id, "ETag": f'"{file.etag}"'})

    def file_at(self, commit: Commit, path: str) -> File:
        """A file that exists."""
        if path not in commit.files:
            raise HubError(404, "Entry not found", "EntryNotFound", **{"X-Repo-Commit": commit.id})
        return commit.files[path]

    # Writing -----------------------------------------------------------------------------------------------------

    def branch(self, repo: str, name: str) -> Answer:
        """Makes or removes a branch."""
        repository = self.writable(repo)
        if self.command == "DELETE":
            if name == "main":
                raise HubError(403, "The main branch cannot be deleted")
            if repository.branches.pop(name, None) is None:
                raise HubError(404, f"Invalid rev id: {name}", "RevisionNotFound")
            return Answer()
        if name in repository.branches:
            raise HubError(409, f"Reference already exists: {name}")
        asked = self.json_body() or {}
        repository.branches[name] = self.commit_at(repository, asked.get("startingPoint") or "main").id
        return Answer.json({})

    def tag(self, repo: str, name: str) -> Answer:
        """Tags a revision (whose name is then in the address), or removes a tag."""
        repository = self.writable(repo)
        if self.command == "DELETE":
            if repository.tags.pop(name, None) is None:
                raise HubError(404, f"Invalid rev id: {name}", "RevisionNotFound")
            return Answer()
        tag = self.json_body()["tag"]
        commit = self.commit_at(repository, name)
        if tag in repository.tags:
            raise HubError(409, f"Reference already exists: {tag}")
        repository.tags[tag] = commit.id
        return Answer.json({})

    def target(self, repo: str, rev: str) -> tuple[Repository, Commit]:
        """What a commit to a revision would be put on: anybody may open a pull request, only members write."""
        if self.query.get("create_pr"):
            repository = self.readable(repo)
            if self.user() is None:
                raise HubError(401, ANONYMOUS)
            return repository, self.commit_at(repository, rev)
        repository = self.writable(repo)
        if rev not in repository.head_of(rev):
            raise HubError(404, f"Invalid rev id: {rev}", "RevisionNotFound")
        return repository, self.commit_at(repository, rev)

    def preupload(self, repo: str, rev: str) -> Answer:
        """How each file is to be sent, and what of that name is there already."""
        _, commit = self.target(repo, rev)
        asked = self.json_body()
        ignored = commit.files.get(".gitignore")
        rules = asked.get("gitIgnore") or (ignored.content.decode() if ignored and ignored.content else "")
        rules = [line.strip() for line in rules.splitlines() if line.strip() and not line.startswith("#")]
        answers = []
        for file in asked["files"]:
            path, sample = file["path"], base64.b64decode(file["sample"])
            there = commit.files.get(path)
            answers.append(
                {
                    "path": path,
                    "uploadMode": "lfs" if is_large(commit.files, path, file["size"], sample) else "regular",
                    "shouldIgnore": any(
                        fnmatch.fnmatch(path, rule) or fnmatch.fnmatch(path.split("/")[-1], rule) for rule in rules
                    ),
                    **({"oid": there.etag} if there is not None else {}),
                }
            )
        return Answer.json({"files": answers, "commitOid": commit.id})

    def lfs_batch(self, repo: str) -> Answer:
        """Where to send large files; nowhere those that are here."""
        asked = self.json_body()
        # without a branch it is for a pull request, which anybody with a name may open
        repository = self.readable(repo) if self.user() and "ref" not in asked else self.writable(repo)
        if asked.get("operation") != "upload" or asked.get("hash_algo", "sha256") != "sha256":
            raise HubError(422, "only uploads by SHA-256 here")
        objects, transfer = [], "basic"
        for each in asked["objects"]:
            oid, size = each["oid"], each["size"]
            described = {"oid": oid, "size": size}
            if oid not in repository.objects:
                part_bytes = self.hub.part_bytes
                if part_bytes is not None and size > part_bytes and "multipart" in asked["transfers"]:
                    upload, transfer = self.start_in_parts(repository, oid, size, part_bytes), "multipart"
                else:
                    upload = {"href": self.hub.signed(self.hub.storage_url, "PUT", f"/storage/{repo}/{oid}")}
                verify = {"href": f"{self.hub.url}/{repo}.git/info/lfs/objects/verify"}
                described |= {"authenticated": True, "actions": {"upload": upload, "verify": verify}}
            objects.append(described)
        return Answer.json({"transfer": transfer, "objects": objects})

    def start_in_parts(self, repository: Repository, oid: str, size: int, part_bytes: int) -> dict[str, Any]:
        """The addresses of the parts of a file, and the one to tell when all are there."""
        upload = secrets.token_hex(8)
        repository.uploads[upload] = {}
        place = f"/storage/{repository.id}/{oid}/{upload}"
        parts = {
            str(number): self.hub.signed(self.hub.storage_url, "PUT", f"{place}/{number}")
            for number in range(1, ceil(size / part_bytes) + 1)
        }
        href = self.hub.signed(self.hub.url, "POST", f"/complete/{repository.id}/{oid}/{upload}")
        return {"href": href, "header": {"chunk_size": str(part_bytes), **parts}}

    def lfs_complete(self, repo: str, oid: str, upload: str) -> Answer:
        """Puts the parts of a file together."""
        self.check_signature()
        repository = self.hub.repositories[repo]
        parts, asked = repository.uploads[upload], self.json_body()
        told = {part["partNumber"]: part["etag"] for part in asked["parts"]}
        there = {number: f'"{hashlib.md5(content).hexdigest()}"' for number, content in parts.items()}
        if asked["oid"] != oid or told != there:
            raise HubError(400, "InvalidPart")
        content = b"".join(content for _, content in sorted(parts.items()))
        self.check_hash(content, oid)
        repository.objects[oid] = content
        del repository.uploads[upload]
        return Answer.json({})

    def lfs_verify(self, repo: str) -> Answer:
        """Whether a file has arrived."""
        repository, asked = self.readable(repo), self.json_body()
        if self.entry.user is None:
            raise HubError(401, ANONYMOUS)
        if len(repository.objects.get(asked["oid"], b"")) != asked["size"]:
            raise HubError(404, "Object does not exist")
        return Answer.json({})

    def commit(self, repo: str, rev: str) -> Answer:
        """A commit, all of it or nothing."""
        repository, parent = self.target(repo, rev)
        header, *operations = [json.loads(line) for line in self.body.splitlines() if line]
        if header["key"] != "header" or not header["value"]["summary"]:
            raise HubError(400, "a commit begins with its header")
        expected = header["value"].get("parentCommit")
        if expected is not None and not parent.id.startswith(expected):
            raise HubError(412, "A commit has happened since. Please refresh and try again.")
        files = dict(parent.files)
        for operation in operations:
            self.apply(repository, files, operation["key"], operation["value"])
        answer = {}
        if self.query.get("create_pr"):
            number = len(repository.pull_requests) + 1
            rev = f"refs/pr/{number}"
            repository.pull_requests[rev] = parent.id
            answer = {"pullRequestUrl": f"{self.hub.url}/{repo}/discussions/{number}"}
        value = header["value"]
        added = repository.add(rev, files, value["summary"], value.get("description", ""), self.entry.user)
        url = f"{self.hub.url}/{repo}/commit/{added.id}"
        return Answer.json({"success": True, "commitOid": added.id, "commitUrl": url, "hookOutput": "", **answer})

    def apply(self, repository: Repository, files: dict[str, File], key: str, value: dict[str, Any]) -> None:
        """One operation of a commit."""
        path = value["path"]
        if path.startswith("/") or {"", ".", "..", ".git"} & set(path.rstrip("/").split("/")):
            raise HubError(400, f"Invalid path: {path}")
        if key == "file":
            if value.get("encoding") != "base64":
                raise HubError(400, "a file's content must be in base64")
            content = base64.b64decode(value["content"], validate=True)
            if is_large(files, path, len(content), content[:512]) and content:
                raise HubError(400, f"Your push was rejected because {path} belongs into the storage.")
            in_space = repository.id.startswith("spaces/")
            if path == "README.md" and (errors := card_errors(content.decode(), in_space)):
                raise HubError(400, f"Invalid metadata in README.md: {'; '.join(errors)}")
            files[path] = File(len(content), content)
        elif key == "lfsFile":
            stored = repository.objects.get(value["oid"])
            if value.get("algo") != "sha256" or stored is None or len(stored) != value.get("size", len(stored)):
                raise HubError(400, f"LFS pointer pointed to a file that does not exist: {path}")
            files[path] = File(len(stored), sha256=value["oid"])
        elif key == "deletedFile":
            if files.pop(path, None) is None:
                raise HubError(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
        elif key == "deletedFolder":
            inside = [name for name in files if name.startswith(path.rstrip("/") + "/")]
            if not inside:
                raise HubError(404, f"A folder with this name doesn't exist: {path}", "EntryNotFound")
            for name in inside:
                del files[name]
        else:
            raise HubError(400, f"no such operation: {key}")


def describe(commit: Commit, path: str) -> dict[str, Any]:
    """A file or folder as listings have it."""
    file = commit.files.get(path)
    if file is None:
        return {"type": "directory", "oid": hashlib.sha1(path.encode()).hexdigest(), "size": 0, "path": path}
    described = {"type": "file", "oid": file.blob_id, "size": file.size, "path": path}
    return described | ({"lfs": file.lfs} if file.lfs else {})


@contextlib.contextmanager
def faultless(hub: HubServer) -> Iterator[HubServer]:
    """Within it faults may be injected; after it none is left."""
    try:
        yield hub
    finally:
        hub.forget_faults()
