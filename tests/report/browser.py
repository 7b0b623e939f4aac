"""Drive a headless Chromium over its debugging pipe: no port, no extra package.

`visit` opens one local file and reports everything the page said, asked for or showed."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
# The browser expects the pipe on descriptors 3 and 4, whatever numbers it has here.
LAUNCH = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3])
os.dup2(read, 3); os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


@dataclass
class Visit:
    """What happened while a page was open."""

    text: str = ""
    scripts: int = -1
    overflow: float = 0.0
    console: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)


class Browser:
    """One browser process with a throw-away profile."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        there, self._write = os.pipe()
        self._read, back = os.pipe()
        flags = [
            "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
            "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--remote-debugging-pipe",
            f"--user-data-dir={profile}", "about:blank",
        ]  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(there), str(back), CHROMIUM, *flags],
            pass_fds=(there, back),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(there)
        os.close(back)
        self._buffer = b""
        self._number = 0
        self._events: list[dict[str, Any]] = []

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._write)
        os.close(self._read)

    def _message(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                raise TimeoutError("the browser did not answer in time")
            piece = os.read(self._read, 1 << 16)
            if not piece:
                raise TimeoutError("the browser closed the pipe")
            self._buffer += piece
        raw, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(raw))

    def call(self, method: str, session: str | None = None, wait: float = 60, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + wait
        while True:
            answer = self._message(deadline)
            if answer.get("id") == message["id"]:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self._events.append(answer)

    def until(self, method: str, wait: float = 60) -> None:
        deadline = time.monotonic() + wait
        while not any(event.get("method") == method for event in self._events):
            self._events.append(self._message(deadline))

    def visit(self, page: Path, width: int = 1100, height: int = 800) -> Visit:
        """Open the page, wait until it is loaded and quiet, and read what it shows."""
        self._events.clear()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable", session)
        self.call(
            "Emulation.setDeviceMetricsOverride", session, width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        self.call("Page.navigate", session, url=page.as_uri())
        self.until("Page.loadEventFired")
        seen = Visit(
            text=self._evaluate(session, "document.body.innerText"),
            scripts=self._evaluate(session, "document.scripts.length"),
            overflow=self._evaluate(session, "document.documentElement.scrollWidth - window.innerWidth"),
        )
        self.call("Target.closeTarget", targetId=target)
        for event in self._events:
            self._record(event.get("method", ""), event.get("params", {}), page, seen)
        return seen

    def _evaluate(self, session: str, expression: str) -> Any:
        return self.call("Runtime.evaluate", session, expression=expression)["result"]["value"]

    @staticmethod
    def _record(method: str, params: dict[str, Any], page: Path, seen: Visit) -> None:
        if method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            seen.console.append(json.dumps(params)[:300])
        elif method == "Page.javascriptDialogOpening":
            seen.dialogs.append(str(params.get("message")))
        elif method == "Network.requestWillBeSent":
            address = params["request"]["url"]
            if address != page.as_uri() and not address.startswith("data:"):
                seen.requests.append(address)
