"""Pages as a browser sees them: taken apart into tags, or in chromium, told what to do by the DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any


FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
    "--remote-debugging-pipe",
)


def find_chromium() -> str | None:
    """The path of chromium or Chrome; None where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


class Page(HTMLParser):
    """Tags with their attributes, and the text in each script, of a page as a browser takes it apart."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, text):
        if self.cdata_elem == "script":
            self.scripts[-1] += text

    @property
    def data(self) -> dict:
        return json.loads(self.scripts[0])


class Browser:
    """One page in chromium.

    Args:
        read, write: Ends of the pipes from and to the browser.
    """

    def __init__(self, read: int, write: int):
        self.read, self.write = read, write
        self.buffer, self.number = b"", 0
        self.session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def message(self, seconds: float) -> dict[str, Any]:
        """The next message of the browser."""
        end = time.monotonic() + seconds
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.read], [], [], max(0, end - time.monotonic()))
            if not ready:
                raise TimeoutError("the browser does not answer")
            chunk = os.read(self.read, 1 << 16)
            if not chunk:
                raise EOFError("the browser has gone")
            self.buffer += chunk
        one, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(one)

    def call(self, method: str, **params: Any) -> Any:
        """The result of a command of the protocol; events that come meanwhile are kept in `events`."""
        self.number += 1
        command = {"id": self.number, "method": method, "params": params}
        if self.session:
            command["sessionId"] = self.session
        os.write(self.write, json.dumps(command).encode() + b"\0")
        while True:
            found = self.message(60)
            if found.get("id") == self.number:
                assert "error" not in found, found
                return found["result"]
            self.events.append(found)

    def open(self, path: Path, width: int = 1300, height: int = 1000, dark: bool = False) -> None:
        """Opens a file in a window of that size and waits until it is there."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events = []
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self.message(60))

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def point_at(self, selector: str, index: int = 0, click: bool = False) -> None:
        """Moves the mouse to the middle of an element, and clicks there on request."""
        element = f"document.querySelectorAll({json.dumps(selector)})[{index}]"
        self.ask(f"{element}.scrollIntoView({{block: 'center'}})")
        box = self.ask(f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])"
                       f"({element}.getBoundingClientRect())")  # fmt: skip
        where = {"x": box[0], "y": box[1]}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **where)
        if click:
            for kind in ("mousePressed", "mouseReleased"):
                self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **where)

    def press(self, key: str, shift: bool = False) -> None:
        """Presses a key, by the name that pages know it by."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, modifiers=8 if shift else 0)

    def picture(self, path: Path) -> None:
        """Writes what the window shows, as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def complaints(self) -> list[dict[str, Any]]:
        """Errors, warnings and blocked loads since the page was opened, and requests other than that for the page."""
        self.ask("0")
        kinds = (
            "Log.entryAdded",
            "Runtime.exceptionThrown",
            "Runtime.consoleAPICalled",
            "Page.javascriptDialogOpening",
        )
        found = [event for event in self.events if event.get("method") in kinds]
        requests = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return found + [each for each in requests[1:] if not each["params"]["request"]["url"].startswith("data:")]


@contextlib.contextmanager
def running_browser(chromium: str) -> Iterator[Browser]:
    """Starts a browser with a profile of its own, and ends it afterwards."""
    to_us, from_browser = os.pipe()
    to_browser, from_us = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            # chromium reads commands from file descriptor 3 and answers on 4.
            ["bash", "-c", f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}', chromium, *FLAGS]
            + [f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        try:
            yield Browser(to_us, from_us)
        finally:
            os.close(from_us)
            process.terminate()
            process.wait(30)
            os.close(to_us)
