"""A headless Chromium, spoken to over WebDriver's HTTP; no library is needed for that.

Source: W3C WebDriver. Chromium and its driver are Debian's packages; without them tests skip by name.
"""

from __future__ import annotations

import base64
import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
ENTER, ESCAPE, TAB, LEFT = "\ue007", "\ue00c", "\ue004", "\ue012"
_PATIENCE_S = 30.0
_POLL_S = 0.05


@dataclass
class Browser:
    """One window."""

    client: httpx.Client
    session: str

    def open(self, url: str) -> None:
        self._post("url", url=url)

    def emulate(self, width: int, height: int, scheme: str) -> None:
        """A screen of this size whose owner prefers "light" or "dark"."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._devtools("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._devtools("Emulation.setEmulatedMedia", features=features)

    def run(self, script: str, *values: Any) -> Any:
        return self._post("execute/sync", script=script, args=list(values))

    def text(self, css: str) -> str:
        return self.run("return document.querySelector(arguments[0])?.textContent ?? ''", css)

    def focused(self) -> str:
        return self.run("return document.activeElement?.id ?? ''")

    def click(self, css: str) -> None:
        self._post(f"element/{self._find(css)}/click")

    def type(self, css: str, text: str) -> None:
        self._post(f"element/{self._find(css)}/value", text=text)

    def keys(self, *keys: str) -> None:
        """Presses keys where the focus is."""
        presses = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._post("actions", actions=[{"type": "key", "id": "keyboard", "actions": presses}])

    def screenshot(self) -> bytes:
        """The whole page as PNG, also what is scrolled out of sight."""
        shot = self._devtools("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])

    def wait(self, is_so: Callable[[], Any], what: str) -> None:
        """Asks again until it is so; a page tells no one else when it has changed."""
        until = time.monotonic() + _PATIENCE_S
        while not is_so():
            assert time.monotonic() < until, f"waited in vain: {what}"
            time.sleep(_POLL_S)

    def _find(self, css: str) -> str:
        return self._post("element", using="css selector", value=css)[_ELEMENT]

    def _devtools(self, command: str, **values: Any) -> Any:
        return self._post("goog/cdp/execute", cmd=command, params=values)

    def _post(self, path: str, **body: Any) -> Any:
        response = self.client.post(f"/session/{self.session}/{path}", json=body)
        return _value(response)


@contextlib.contextmanager
def browsing(*, is_dark: bool = False) -> Generator[Browser]:
    """Starts a driver and a browser, and ends both."""
    driver, chromium = shutil.which("chromedriver"), shutil.which("chromium")
    if driver is None or chromium is None:
        pytest.skip("no chromium with chromedriver")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [driver, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            _await_driver(client)
            session = _session(client, chromium, is_dark=is_dark)
            try:
                yield Browser(client, session)
            finally:
                client.delete(f"/session/{session}")
    finally:
        process.terminate()
        process.wait()


def _await_driver(client: httpx.Client) -> None:
    until = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until:
        with contextlib.suppress(httpx.TransportError):
            if _value(client.get("/status"))["ready"]:
                return
        time.sleep(_POLL_S)
    raise AssertionError("the driver did not start")


def _session(client: httpx.Client, chromium: str, *, is_dark: bool) -> str:
    arguments = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
    if is_dark:
        arguments.append("--force-dark-mode")
        arguments.append("--blink-settings=preferredColorScheme=0")
    options = {"binary": chromium, "args": arguments}
    capabilities = {"alwaysMatch": {"goog:chromeOptions": options}}
    response = client.post("/session", json={"capabilities": capabilities})
    return _value(response)["sessionId"]


def _value(response: httpx.Response) -> Any:
    value = response.json()["value"]
    if response.status_code != 200:
        raise AssertionError(f"{value['error']}: {value['message']}")
    return value
