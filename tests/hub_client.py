"""An interpreter that keeps running, in which tests use the real client against a `hub_server.HubServer`.

huggingface_hub reads the Hub's address and whether it is offline when it is imported, so the tests' own process cannot
speak to another Hub; and each new process pays seconds for importing torch and transformers. Hence one process, to
which pieces of code are sent.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path
from typing import Any


TIMEOUT_SECONDS = 300
TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src"

# Nothing but the Hub of the test can be reached; retries do not wait; standard input and output belong to the tasks.
PREAMBLE = """
import contextlib, io, json, os, socket, sys, time, traceback

tasks, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.dup2(2, 1)
connections = []
connect = socket.socket.connect

def connect_to_loopback(self, address):
    if self.family == socket.AF_INET and address[0] != "127.0.0.1" or self.family == socket.AF_INET6:
        connections.append(address)
        raise OSError(f"connection to {address} in a test without a network")
    return connect(self, address)

def no_addresses(host, *rest, **more):
    if host not in ("127.0.0.1", "localhost"):
        connections.append(host)
        raise socket.gaierror(f"address of {host} asked for in a test without a network")
    return getaddrinfo("127.0.0.1", *rest, **more)  # localhost is ::1 as well, where nobody listens

getaddrinfo, socket.getaddrinfo = socket.getaddrinfo, no_addresses
socket.socket.connect = connect_to_loopback
sleep = time.sleep
time.sleep = lambda seconds: sleep(min(seconds, 0.01))
"""

WITHOUT_PACKAGE = """
class NoPackage:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("vanilla_transformer", "vanilla_transformer_cli"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoPackage())
"""

WITH_PACKAGE = """
import vanilla_transformer
"""

LOOP = """
import huggingface_hub, torch, transformers  # before it is asked, while the test still prepares

def switch_to(home, token):
    # A fresh cache, or another user, without another process.
    import huggingface_hub.constants as constants
    constants.HF_HUB_CACHE = os.path.join(home, "hub")
    os.environ.pop("HF_TOKEN", None)
    if token is not None:
        os.environ["HF_TOKEN"] = token

for line in tasks:
    task = json.loads(line)
    connections.clear()
    names = {**task["values"], "__name__": "snippet"}
    printed = io.StringIO()
    try:
        switch_to(task["home"], task["token"])
        with contextlib.redirect_stdout(printed):
            exec(compile(task["code"], "snippet", "exec"), names)
        answer = {"result": names.get("result")}
    except BaseException as error:
        chain = [error]
        while chain[-1].__cause__ is not None:
            chain.append(chain[-1].__cause__)
        answer = {
            "error": type(error).__name__,
            "message": str(error),
            "causes": [type(each).__name__ for each in chain],
            "traceback": traceback.format_exc(),
        }
    answer |= {"printed": printed.getvalue(), "connections": [repr(each) for each in connections]}
    answers.write(json.dumps(answer) + "\\n")
    answers.flush()

os._exit(0)  # nothing of this process is needed any more, and taking torch down in order takes seconds
"""


class ClientError(Exception):
    """What a piece of code raised there.

    Attributes:
        type: Name of the exception's class.
        message: Its text.
        causes: Names of the classes from the exception down to the first cause.
    """

    def __init__(self, answer: dict[str, Any]):
        super().__init__(answer["traceback"])
        self.type, self.message, self.causes = answer["error"], answer["message"], answer["causes"]


class HubClient:
    """The interpreter; a context manager.

    Args:
        environment: From `HubServer.environment`.
        package: Whether the package can be imported there. If so, the tests' own modules can, too.

    Attributes:
        connections: Hosts other than this machine that the last piece of code wanted to reach, in vain.
        printed: What it wrote to standard output.
    """

    def __init__(self, environment: dict[str, str], *, package: bool = True):
        environment = dict(environment)
        home = Path(environment["HF_HOME"])
        home.mkdir(parents=True, exist_ok=True)
        self.token = environment.get("HF_TOKEN")
        environment.pop("PYTHONPATH", None)
        if package:
            environment["PYTHONPATH"] = os.pathsep.join([str(SOURCE), str(TESTS)])
        code = PREAMBLE + (WITH_PACKAGE if package else WITHOUT_PACKAGE) + LOOP
        self.home = tempfile.mkdtemp(dir=home)
        self.connections: list[str] = []
        self.printed = ""
        self._errors = (home / "stderr").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, *([] if package else ["-I"]), "-c", code],
            env=environment,
            cwd=home,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def __enter__(self) -> HubClient:
        return self

    def __exit__(self, *_: Any) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def _listen(self) -> None:
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def run(self, code: str, *, token: str | None = "", fresh: bool = False, **values: Any) -> Any:
        """Runs a piece of code and returns what it called `result`.

        Args:
            code: The lines, which may be indented.
            token: What to be logged in with during these lines; None means not at all, "" as in the environment.
            fresh: Whether to use an empty cache from here on.
            values: Variables of the code, and all that goes there and comes back, are what JSON can hold.

        Raises:
            ClientError: The code raised this.
        """
        if fresh:
            self.home = tempfile.mkdtemp(dir=Path(self.home).parent)
        task = {
            "code": textwrap.dedent(code),
            "values": values,
            "home": self.home,
            "token": self.token if token == "" else token,
        }
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        try:
            line = self._answers.get(timeout=TIMEOUT_SECONDS)
        except queue.Empty:
            self._process.kill()
            line = ""
        if not line:
            self._errors.seek(0)
            raise RuntimeError(f"the other interpreter is gone: {self._errors.read()[-3000:]}")
        answer = json.loads(line)
        self.connections, self.printed = answer["connections"], answer["printed"]
        if "error" in answer:
            raise ClientError(answer)
        return answer["result"]
