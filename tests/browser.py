"""A browser for tests: Debian's Chromium without a screen, driven by its DevTools protocol over two pipes.

Nothing is downloaded: the browser is found by its path. Without one, tests are skipped, and say so; where `CI` is true
they fail.
"""

import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from queue import Empty, Queue
from types import TracebackType
from typing import Any, NamedTuple

import pytest

PATIENCE = 30.0  # seconds, for facts that come within milliseconds
_NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")


def browser_path() -> str:
    """Return the path of the browser. Skips the test if there is none, or fails it where `CI` is true."""
    for name in _NAMES:
        if (path := shutil.which(name)) is not None:
            return path
    why = "there is no Chromium: apt-get install chromium"
    if os.environ.get("CI", "").lower() in {"1", "true"}:
        pytest.fail(why)
    pytest.skip(why)


class Size(NamedTuple):
    """The size of a window."""

    width: int
    height: int


DESKTOP, PHONE = Size(1280, 860), Size(390, 844)


class Browser:
    """A browser with its own profile; a context manager."""

    def __init__(self, profile: Path) -> None:
        self._profile = profile
        self._numbers = itertools.count(1)
        self._answers: dict[int, Queue[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> "Browser":
        ours_to_write, theirs_to_read = os.pipe()[::-1]
        ours_to_read, theirs_to_write = os.pipe()
        command = [
            browser_path(), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--remote-debugging-pipe", f"--user-data-dir={self._profile}", "--no-first-run", "--hide-scrollbars",
            "--disable-extensions", "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--js-flags=--expose-gc", "--force-color-profile=srgb", "--lang=en", "about:blank",
        ]  # fmt: skip

        # The browser reads from 3 and writes to 4.
        run = f'exec 3<&{theirs_to_read} 4>&{theirs_to_write}; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", run, "browser", *command],
            pass_fds=(theirs_to_read, theirs_to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_to_read)
        os.close(theirs_to_write)
        self._out = os.fdopen(ours_to_write, "wb", buffering=0)
        self._in = os.fdopen(ours_to_read, "rb", buffering=0)
        self._reader = threading.Thread(target=self._read, name="browser", daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        with contextlib.suppress(OSError):
            self.send("Browser.close", wait=False)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)  # what it has left of its helpers
        self._reader.join(PATIENCE)
        self._out.close()
        self._in.close()

    def _read(self) -> None:
        rest = b""
        with contextlib.suppress(OSError, ValueError):
            while chunk := self._in.read(1 << 16):
                *messages, rest = (rest + chunk).split(b"\0")
                for message in messages:
                    self._hear(json.loads(message))

    def _hear(self, message: dict[str, Any]) -> None:
        if "id" in message:
            if (answers := self._answers.pop(message["id"], None)) is not None:
                answers.put(message)
        elif (page := self._pages.get(message.get("sessionId", ""))) is not None:
            page.hear(message["method"], message["params"])

    def send(self, method: str, *, session: str | None = None, wait: bool = True, **params: Any) -> dict[str, Any]:
        """Send a command; return its result."""
        with self._lock:
            number = next(self._numbers)
            answers = self._answers[number] = Queue()
            message = {"id": number, "method": method, "params": params}
            self._out.write(json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        if not wait:
            return {}
        try:
            answer = answers.get(timeout=PATIENCE)
        except Empty:
            raise TimeoutError(f"the browser has not answered {method}") from None
        assert "error" not in answer, (method, answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def page(self, size: Size = DESKTOP, *, dark: bool = False) -> "Page":
        """Open a tab."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session, target)
        page.begin(size, dark=dark)
        return page


class Page:
    """A tab."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser, self._session, self.target = browser, session, target
        self.problems: list[str] = []
        """What the console of the browser has complained about: errors of scripts, and breaches of the policy."""
        self._loaded = threading.Event()

    def begin(self, size: Size, *, dark: bool) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.send("Emulation.setEmulatedMedia", features=[scheme, still])
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=size.width,
            height=size.height,
            deviceScaleFactor=1,
            mobile=size.width < 600,
        )

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.send(method, session=self._session, **params)

    def hear(self, method: str, params: Mapping[str, Any]) -> None:
        match method:
            case "Page.loadEventFired":
                self._loaded.set()
            case "Runtime.exceptionThrown":
                self.problems.append(str(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.problems.append(params["entry"]["text"])
            case _:
                pass

    def open(self, url: str) -> None:
        """Go to a page, and wait until it is there."""
        self._loaded.clear()
        self.send("Page.navigate", url=url)
        assert self._loaded.wait(PATIENCE), url

    def run(self, script: str) -> Any:
        """Return the value of an expression."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, script: str, *, within: float = PATIENCE) -> Any:
        """Wait until an expression is true, also over the way to another page; return its value."""
        limit = time.monotonic() + within
        seen: Any = None
        while time.monotonic() < limit:
            with contextlib.suppress(AssertionError):  # the page is being replaced
                if seen := self.run(script):
                    return seen
            time.sleep(0.03)
        raise AssertionError(f"not within {within:g} s: {script}\n{self.run('document.body.innerText')}")

    def click(self, selector: str) -> None:
        """Click the first element that matches."""
        self.until(f"!!document.querySelector({json.dumps(selector)})")
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def click_text(self, text: str) -> None:
        """Click the link or the button with this text."""
        of_text = f"[...document.querySelectorAll('a, button')].find(e => e.textContent.trim() === {json.dumps(text)})"
        self.until(f"!!{of_text}")
        self.run(f"{of_text}.click()")

    def press(self, key: str) -> None:
        """Press a key."""
        text = key if len(key) == 1 else ("\r" if key == "Enter" else "")
        for kind in ("keyDown", "keyUp"):
            of_text = {"text": text} if text and kind == "keyDown" else {}
            self.send("Input.dispatchKeyEvent", type=kind, key=key, **of_text)

    @property
    def text(self) -> str:
        """All that the page shows."""
        return str(self.run("document.body.innerText"))

    def picture(self, path: Path, *, whole: bool = False) -> Path:
        """Make a picture of what can be seen, or of the whole page."""
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))
        return path

    def heap(self) -> int:
        """Return the bytes of all objects of the page that are still used."""
        self.send("HeapProfiler.collectGarbage")
        return int(self.send("Runtime.getHeapUsage")["usedSize"])

    def front(self) -> None:
        """Bring the tab to the front."""
        self.send("Page.bringToFront")

    def close(self) -> None:
        """Close the tab."""
        self._browser.send("Target.closeTarget", targetId=self.target)


@contextlib.contextmanager
def running(profile: Path) -> Iterator[Callable[..., Page]]:
    """Run a browser, and give what opens its tabs."""
    with Browser(profile) as browser:
        yield browser.page
