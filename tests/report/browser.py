"""Debian's Chromium, driven by its own driver over HTTP (the WebDriver protocol), so that no
package is needed for it.
"""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DRIVERS = ("chromedriver", "chromium.chromedriver")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
)
STARTING = 30.0
"""Seconds that the driver may take to answer."""


def _first(names: tuple[str, ...]) -> str | None:
    return next(filter(None, map(shutil.which, names)), None)


def missing() -> str:
    """Why no browser can be driven here; "" where one can."""
    if _first(BROWSERS) is None:
        return "no Chromium is installed (Debian: apt-get install chromium chromium-driver)"
    return (
        ""
        if _first(DRIVERS)
        else "no chromedriver is installed (Debian: apt-get install chromium-driver)"
    )


class Browser:
    """A window of a browser that was just born: its profile is new and empty, and dies with it."""

    def __init__(self, width: int = 1200, height: int = 900) -> None:
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        driver = _first(DRIVERS)
        assert driver is not None
        self.process = subprocess.Popen(
            [driver, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.address = f"http://127.0.0.1:{port}"
        try:
            self._wait()
            flags = [
                *FLAGS,
                f"--window-size={width},{height}",
                f"--user-data-dir={self.folder.name}",
            ]
            options = {"binary": _first(BROWSERS), "args": flags}
            wanted = {
                "browserName": "chrome",
                "goog:chromeOptions": options,
                "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
            }
            self.session = (
                "/session/"
                + self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})[
                    "sessionId"
                ]
            )
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._ask("DELETE", self.session)
        finally:
            self._end()

    def _end(self) -> None:
        self.process.terminate()
        self.process.wait(10)
        self.folder.cleanup()

    def _wait(self) -> None:
        end = time.monotonic() + STARTING
        while True:
            try:
                if self._ask("GET", "/status")["ready"]:
                    return
            except OSError:
                if time.monotonic() > end:
                    raise
            time.sleep(0.05)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = json.dumps(body or {}).encode() if method == "POST" else None
        request = urllib.request.Request(
            self.address + path,
            data=data,
            method=method,
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(json.load(error)["value"]["message"]) from None

    def open(self, page: Path) -> float:
        """Load a file and wait until all of it is there and drawn; the seconds that took."""
        self._ask("POST", f"{self.session}/url", {"url": "about:blank"})
        for kind in ("browser", "performance"):
            self.log(kind)
        start = time.monotonic()
        self._ask("POST", f"{self.session}/url", {"url": page.resolve().as_uri()})
        self.run("return new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)))")
        return time.monotonic() - start

    def run(self, script: str, *arguments: object) -> Any:
        """The value that a script returns; a promise is waited for."""
        return self._ask(
            "POST", f"{self.session}/execute/sync", {"script": script, "args": list(arguments)}
        )

    def devtools(self, command: str, **parameters: object) -> Any:
        """A command of the browser's own tools."""
        return self._ask(
            "POST", f"{self.session}/goog/cdp/execute", {"cmd": command, "params": parameters}
        )

    def log(self, kind: str) -> list[dict[str, Any]]:
        """The entries that were logged since the last call."""
        entries: list[dict[str, Any]] = self._ask("POST", f"{self.session}/se/log", {"type": kind})
        return entries

    def requests(self) -> list[str]:
        """The addresses that were asked for since the page was opened."""
        messages = [json.loads(entry["message"])["message"] for entry in self.log("performance")]
        return [
            m["params"]["request"]["url"]
            for m in messages
            if m["method"] == "Network.requestWillBeSent"
        ]

    def keys(self, text: str) -> None:
        """Type on the keyboard: each character is a key, those of WebDriver (such as TAB) among
        them.
        """
        actions = [{"type": kind, "value": key} for key in text for kind in ("keyDown", "keyUp")]
        self._ask(
            "POST",
            f"{self.session}/actions",
            {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]},
        )

    def picture(self, path: Path, selector: str = "html") -> None:
        """Write what stands in an element, all of it, as a PNG."""
        box = self.run(
            "const r = document.querySelector(arguments[0]).getBoundingClientRect();"
            "return [r.left + scrollX, r.top + scrollY, r.width, Math.min(r.height, 8000)]",
            selector,
        )
        clip = dict(zip(("x", "y", "width", "height"), box, strict=True), scale=1)
        screenshot = self.devtools(
            "Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip
        )
        path.write_bytes(base64.b64decode(screenshot["data"]))


TAB = "\ue004"
ENTER = "\ue007"
SPACE = " "
