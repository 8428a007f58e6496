"""A headless Chromium that tests ask over a pipe, in Chrome's DevTools protocol."""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

SECONDS = 30.0
"""That an answer may take."""


class Browser:
    """One page at a time. ``messages``: what it has written to the console, and errors of it."""

    def __init__(self) -> None:
        program = shutil.which("chromium") or shutil.which("google-chrome")
        assert program, "got no chromium; expected one. Run: sudo apt install chromium"
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        # --remote-debugging-pipe reads from descriptor 3 and writes to 4
        command = (
            f'exec 3<&{theirs_in} 4>&{theirs_out} && exec "$0" --headless --no-sandbox '
            "--remote-debugging-pipe --disable-gpu --disable-dev-shm-usage --no-first-run "
            f"--user-data-dir={self._folder.name} about:blank"
        )
        self._process = subprocess.Popen(
            ["bash", "-c", command, program],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._content, self._numbers = b"", itertools.count(1)
        self.messages: list[str] = []
        self._events: list[str] = []
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        attached = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    _session = ""

    def call(self, method: str, parameters: "dict[str, Any] | None" = None) -> "dict[str, Any]":
        """Call a method of the protocol, of the page once there is one."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters or {}}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer)
                return answer["result"]

    def _next(self) -> "dict[str, Any]":
        end = time.monotonic() + SECONDS
        while b"\0" not in self._content:
            ready, _, _ = select.select([self._from], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            content = os.read(self._from, 2**20)
            assert content, f"the browser ended with {self._process.wait()}"
            self._content += content
        first, self._content = self._content.split(b"\0", 1)
        message = json.loads(first)
        if "method" in message:
            self._events.append(message["method"])
            if message["method"] in (
                "Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"
            ):  # fmt: skip
                self.messages.append(json.dumps(message["params"])[:1000])
        return message

    def open(self, page: Path, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Show a file in a window of so many points."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.messages.clear()
        self._events.clear()
        self.call("Page.navigate", {"url": page.resolve().as_uri()})
        while "Page.loadEventFired" not in self._events:
            self._next()
        # two frames: charts are drawn when their width is known
        self.ask("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def ask(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.call(
            "Runtime.evaluate",
            {"expression": script, "returnByValue": True, "awaitPromise": True},
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def move_mouse(self, x: float, y: float) -> None:
        """Move the mouse to a point of the window."""
        self.call("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": x, "y": y})

    def screenshot(self, path: Path, whole: bool = True) -> None:
        """Write a picture of the page as PNG."""
        found = self.call("Page.captureScreenshot", {"captureBeyondViewport": whole})
        path.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        """End it."""
        os.close(self._to)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._from)
        self._folder.cleanup()
