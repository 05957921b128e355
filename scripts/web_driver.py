"""A page in headless Chromium, driven through chromedriver by a few W3C WebDriver commands."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
]
KEYS = {"left": "\ue012", "up": "\ue013", "right": "\ue014", "down": "\ue015", "end": "\ue010", "home": "\ue011", "tab": "\ue004", "escape": "\ue00c"}  # fmt: skip # noqa: E501
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # key of element references in the standard


def missing_browser() -> str | None:
    """Return which programs for opening pages are missing, None if all are installed."""
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{' and '.join(missing)} not installed" if missing else None


class Browser:
    """One window of Chromium."""

    def __init__(self, session_url: str) -> None:
        self._url = session_url

    def open(self, url: str) -> None:
        """Load a page and wait for it."""
        self._command("POST", "url", {"url": url})

    def value(self, script: str) -> Any:
        """Return the value of a JavaScript expression."""
        body = {"script": f"return {script}", "args": []}
        return self._command("POST", "execute/sync", body)

    def press(self, key: str) -> None:
        """Press and release a key: a name in ``KEYS`` or a character."""
        value = KEYS.get(key, key)
        strokes = [{"type": kind, "value": value} for kind in ("keyDown", "keyUp")]
        self._command(
            "POST", "actions", {"actions": [{"type": "key", "id": "keys", "actions": strokes}]}
        )

    def point_at(self, selector: str) -> None:
        """Move the pointer over the middle of the first element that matches a CSS selector."""
        element = self._command("POST", "element", {"using": "css selector", "value": selector})
        move = {"type": "pointerMove", "origin": {_ELEMENT: element[_ELEMENT]}, "x": 0, "y": 0}
        pointer = {"type": "pointer", "id": "mouse", "actions": [move]}
        self._command("POST", "actions", {"actions": [pointer]})

    def click(self, selector: str) -> None:
        """Click the first element that matches a CSS selector."""
        element = self._command("POST", "element", {"using": "css selector", "value": selector})
        self._command("POST", f"element/{element[_ELEMENT]}/click", {})

    def console(self) -> list[str]:
        """Return the console's messages since the last call."""
        return [entry["message"] for entry in self._command("POST", "se/log", {"type": "browser"})]

    def screenshot(self) -> bytes:
        """Return the window as PNG."""
        return base64.b64decode(self._command("GET", "screenshot"))

    def _command(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return _request(method, f"{self._url}/{path}", body)


@contextlib.contextmanager
def browser(*, width: int, height: int, is_dark: bool = False) -> Iterator[Browser]:
    """Open a window with a new profile."""
    flags = [*_FLAGS, f"--window-size={width},{height}"]
    if is_dark:
        flags.append("--blink-settings=preferredColorScheme=0")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, _driver() as url:
        chrome = {"args": [*flags, f"--user-data-dir={profile}"], "binary": _path("chromium")}
        wanted = {"goog:chromeOptions": chrome, "goog:loggingPrefs": {"browser": "ALL"}}
        body = {"capabilities": {"alwaysMatch": wanted}}
        session = f"{url}/session/{_request('POST', f'{url}/session', body)['sessionId']}"
        try:
            yield Browser(session)
        finally:
            _request("DELETE", session)


@contextlib.contextmanager
def _driver() -> Iterator[str]:
    """Run chromedriver on a free port; yield its address."""
    command = [_path("chromedriver"), "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            lines = (re.search(r"on port (\d+)\.", line) for line in process.stdout)
            port = next(match[1] for match in lines if match and match[1] != "0")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def _path(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        raise FileNotFoundError(f"{program} is not installed; it is a package of most systems")
    return str(Path(path))


def _request(method: str, url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it runs on this machine
    with opener.open(request, timeout=60) as response:
        return json.load(response)["value"]
