"""A headless Chromium, driven over the pipe of its DevTools protocol.

with Browser(folder) as browser:
    page = browser.open(url, width=375, dark=True)
    page.click("#generate")
    page.wait("document.title === 'done'")
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections import deque
from pathlib import Path
from typing import Any

BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, "Home": 36, "End": 35}
KEYS |= {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


class Browser:
    """Messages are JSON, each ended by a zero byte: read by Chromium from 3, written to 4."""

    def __init__(self, folder: Path, timeout: float = 60) -> None:
        self.timeout = timeout
        to_browser, self._input = os.pipe()
        self._output, from_browser = os.pipe()
        # Above 4, so that neither is overwritten before it is copied.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_browser, from_browser)]

        def copy_ends() -> None:
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        command = [str(BROWSER), "--headless=new", "--remote-debugging-pipe", "--no-sandbox"]
        command += ["--disable-gpu", f"--user-data-dir={folder / 'profile'}", "about:blank"]
        self._process = subprocess.Popen(
            command,
            pass_fds=(3, 4),
            preexec_fn=copy_ends,
            env={**os.environ, "HOME": str(folder)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (to_browser, from_browser, *ends):
            os.close(end)
        self._count = 0
        self._partial = b""
        self._messages: deque[dict[str, Any]] = deque()
        self._pages: dict[str, Page] = {}

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)
        os.close(self._input)
        os.close(self._output)

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """The result of a DevTools method; meanwhile events are passed to their pages."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._input, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == message["id"]:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            page = self._pages.get(answer.get("sessionId", ""))
            if page is not None:
                page.receive(answer)

    def _read(self) -> dict[str, Any]:
        while not self._messages:
            if not select.select([self._output], [], [], self.timeout)[0]:
                raise TimeoutError(f"no answer from Chromium in {self.timeout} s")
            part = os.read(self._output, 1 << 20)
            if not part:
                raise RuntimeError("Chromium has ended")
            *complete, self._partial = (self._partial + part).split(b"\0")
            self._messages.extend(map(json.loads, complete))
        return self._messages.popleft()

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> Page:
        """A new page in a tab of its own, with its own cookies and storage."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        page = self._pages[attached["sessionId"]] = Page(self, attached["sessionId"])
        for domain in ("Runtime", "Log", "Page"):
            page.call(f"{domain}.enable")
        page.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        if problem := page.call("Page.navigate", url=url).get("errorText"):
            raise RuntimeError(f"{url}: {problem}")
        page.wait("document.readyState === 'complete'")
        return page


class Page:
    def __init__(self, browser: Browser, session: str) -> None:
        self.browser = browser
        self.session = session
        self.problems: list[str] = []
        """Errors of scripts, of the console and of the content security policy."""

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **parameters)

    def receive(self, event: dict[str, Any]) -> None:
        parameters = event["params"]
        if event["method"] == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(parameters["exceptionDetails"]))
        if event["method"] == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.problems.append(parameters["entry"]["text"])
        if event["method"] == "Runtime.consoleAPICalled":
            self.problems.append(json.dumps(parameters["args"]))

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, of its promise if it is one."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = 30) -> None:
        """Return as soon as a JavaScript expression is true."""
        end = time.monotonic() + seconds
        while not self.evaluate(f"Boolean({expression})"):
            if time.monotonic() > end:
                shown = self.evaluate("document.body.innerText")
                raise TimeoutError(f"{expression} is not true after {seconds} s:\n{shown}")
            time.sleep(0.02)

    def text(self, selector: str) -> str:
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).textContent")

    def resize(self, width: int, height: int = 900) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 700,
        )

    def point(self, selector: str) -> tuple[float, float]:
        """Scroll to an element and move the mouse over its first line."""
        box = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'center'}); const b = e.getClientRects()[0];"
            " return [b.left + b.width / 2, b.top + b.height / 2]; })()"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
        return box[0], box[1]

    def click(self, selector: str) -> None:
        x, y = self.point(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str, *, ctrl: bool = False) -> None:
        event = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        event["modifiers"] = 2 if ctrl else 0
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **event, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def write(self, text: str) -> None:
        """Type into the focused element."""
        self.call("Input.insertText", text=text)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """`whole`: all of the page, not only the window."""
        image = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(image["data"]))
