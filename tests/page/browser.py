"""A real Chromium, spoken to by its DevTools protocol: pages that are loaded, asked, clicked and
photographed.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from tests.support import require_program

FLAGS = (
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
    ),
    *(
        "--disable-default-apps",
        "--disable-sync",
        "--hide-scrollbars",
        "--remote-debugging-port=0",
        "about:blank",
    ),
)
# seconds; no claim: on a busy machine everything takes longer
START, ANSWER, PATIENCE = 240.0, 240.0, 240.0
Event = dict[str, Any]


class PageError(AssertionError):
    """What the page threw, or did not become."""


class Browser:
    """One process; `page` opens a tab in a profile of its own: nothing stored is shared."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Event]] = {}
        self._pages: dict[str, Page] = {}

    async def send(self, method: str, session: str | None = None, **parameters: Any) -> Event:
        """One command. Raises PageError with the browser's own message."""
        number = next(self._ids)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        command = {"id": number, "method": method, "params": parameters}
        await self._socket.send_json(
            command if session is None else command | {"sessionId": session}
        )
        async with asyncio.timeout(ANSWER):
            answer = await self._waiting[number]
        del self._waiting[number]
        if "error" in answer:
            raise PageError(f"{method}: {answer['error']['message']}")
        return dict(answer["result"])

    async def listen(self) -> None:
        """Hands answers and events to whom they belong."""
        async for message in self._socket:
            event = json.loads(message.data)
            if waiting := self._waiting.get(event.get("id", 0)):
                if not waiting.done():
                    waiting.set_result(event)
            elif page := self._pages.get(event.get("sessionId", "")):
                page.on_event(event["method"], event["params"])

    @contextlib.asynccontextmanager
    async def page(self, width: int = 1280, height: int = 900) -> AsyncIterator[Page]:
        """A tab."""
        context = (await self.send("Target.createBrowserContext"))["browserContextId"]
        target = (
            await self.send("Target.createTarget", url="about:blank", browserContextId=context)
        )["targetId"]
        session = (await self.send("Target.attachToTarget", targetId=target, flatten=True))[
            "sessionId"
        ]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Network", "Log", "DOM", "Accessibility"):
            await page.send(f"{domain}.enable")
        await page.resize(width, height)
        try:
            yield page
        finally:
            await self.send("Target.closeTarget", targetId=target)
            await self.send("Target.disposeBrowserContext", browserContextId=context)
            del self._pages[session]


class Page:
    """One tab, with what it asked for and what it complained of."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.complaints: list[str] = []
        self.urls: list[str] = []
        self._heads: dict[str, int] = {}  # bytes on the wire by request
        self._bodies: dict[str, int] = {}
        self._whole: dict[str, int] = {}
        self._events: dict[str, Event] = {}

    async def send(self, method: str, **parameters: Any) -> Event:
        """One command to this tab."""
        return await self._browser.send(method, self._session, **parameters)

    def on_event(self, method: str, event: Event) -> None:
        """Keeps what the tests ask about."""
        self._events[method] = event
        if method == "Network.requestWillBeSent":
            self.urls.append(event["request"]["url"])
        elif method == "Network.responseReceived":
            self._heads[event["requestId"]] = int(event["response"].get("encodedDataLength", 0))
        elif method == "Network.dataReceived":
            self._bodies[event["requestId"]] = self._bodies.get(event["requestId"], 0) + int(
                event["encodedDataLength"]
            )
        elif method == "Network.loadingFinished":
            self._whole[event["requestId"]] = int(event["encodedDataLength"])
        elif method == "Runtime.exceptionThrown":
            details = event["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and event["type"] in (
            "error",
            "warning",
            "assert",
        ):
            self.complaints.append(
                " ".join(str(each.get("value", each.get("description"))) for each in event["args"])
            )
        elif method == "Log.entryAdded" and event["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{event['entry']['text']} {event['entry'].get('url', '')}")

    @property
    def received(self) -> int:
        """Bytes on the wire, heads included; of a stream, as far as it went."""
        return sum(
            self._whole.get(name, head + self._bodies.get(name, 0))
            for name, head in self._heads.items()
        )

    def outside(self, url: str) -> list[str]:
        """Requests to anywhere but the gateway."""
        return [
            each
            for each in self.urls
            if urlsplit(each).scheme not in ("data", "blob")
            and urlsplit(each).netloc != urlsplit(url).netloc
        ]

    async def resize(self, width: int, height: int, *, scale: float = 1.0) -> None:
        """The window, in CSS pixels."""
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )

    async def open(self, url: str) -> None:
        """Begins to load; does not wait."""
        await self.send("Page.navigate", url=url)

    async def ask(self, script: str) -> Any:
        """What an expression, or the promise that it gives, comes to. Raises PageError where it
        throws.
        """
        answer = await self.send(
            "Runtime.evaluate",
            expression=script,
            awaitPromise=True,
            returnByValue=True,
            userGesture=True,
        )
        if "exceptionDetails" in answer:
            raise PageError(
                answer["exceptionDetails"].get("exception", {}).get("description", "thrown")
            )
        return answer["result"].get("value")

    async def until(self, script: str, seconds: float = PATIENCE) -> None:
        """Return once the expression is true. Raises PageError where that takes longer."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while loop.time() < deadline:
            with contextlib.suppress(PageError):  # while it loads
                if await self.ask(f"Boolean({script})"):
                    return
            await asyncio.sleep(0.05)
        raise PageError(f"not true after {seconds} s: {script}; complaints: {self.complaints}")

    async def complains(self, words: str, seconds: float = PATIENCE) -> None:
        """Return once a complaint has these words: the browser tells of it after it has
        answered. Raises PageError where it never does.
        """
        deadline = asyncio.get_running_loop().time() + seconds
        while not any(words in each for each in self.complaints):
            if asyncio.get_running_loop().time() > deadline:
                raise PageError(
                    f"no complaint with {words!r} after {seconds} s, but {self.complaints}"
                )
            await asyncio.sleep(0.05)

    async def text(self, selector: str) -> str:
        """What an element says."""
        return str(
            await self.ask(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")
        )

    async def click(self, selector: str) -> None:
        """As a script does."""
        await self.ask(f"document.querySelector({json.dumps(selector)}).click()")

    async def type(self, selector: str, value: str) -> None:
        """Sets a control's value as an operator would, with its event."""
        script = "(e, v) => { e.value = v; e.dispatchEvent(new Event('input', {bubbles: true})); }"
        await self.ask(
            f"({script})(document.querySelector({json.dumps(selector)}), {json.dumps(value)})"
        )

    async def press(self, key: str) -> None:
        """One key, down and up."""
        for kind in ("rawKeyDown", "keyUp"):
            await self.send(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode={"Tab": 9, "Escape": 27}[key],
            )

    async def picture(self, path: Path, *, whole: bool = True) -> None:
        """A PNG of the whole page, or of the window."""
        found = await self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        _write(path, base64.b64decode(found["data"]))


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """The system's Chromium, ended on leaving; skips the test (fails it under CI=true) where
    there is none.
    """
    program = require_program("chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        quiet = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(
            program, *FLAGS, f"--user-data-dir={folder}", stdout=quiet, stderr=quiet
        )
        try:
            address = await _address(Path(folder) / "DevToolsActivePort")
            async with (
                aiohttp.ClientSession() as client,
                client.ws_connect(address, max_msg_size=0) as socket,
            ):
                browser = Browser(socket)
                listening = asyncio.create_task(browser.listen())
                yield browser
                listening.cancel()
        finally:
            process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(5):
                    await process.wait()
            if process.returncode is None:
                process.kill()
                await process.wait()


async def _address(file: Path) -> str:
    """Chromium writes its port, then its path."""
    async with asyncio.timeout(START):
        while True:
            lines = _lines(file)
            if len(lines) == 2:
                return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
            await asyncio.sleep(0.05)


def _lines(file: Path) -> list[str]:
    return file.read_text().split() if file.exists() else []
