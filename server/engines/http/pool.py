"""The servers of an engine: found at its start, probed, and given work while they answer."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from kendall.server.engines.base import Capabilities, EngineStartError
from kendall.server.engines.capabilities import UNKNOWN_TOKENS
from kendall.server.engines.http.discovery import (
    Description,
    StartingError,
    described,
    named,
    refusal,
)
from kendall.server.engines.http.standing import share_of
from kendall.server.engines.http.upstream import (
    LOST,
    SILENT,
    Connect,
    Upstream,
    connector,
    reason_of,
)
from kendall.server.engines.proxied import SENDER
from kendall.server.runtime.clock import clock_of

log = logging.getLogger("kendall.engine")
AGAIN = 1.0  # seconds between two looks at servers that do not serve yet
SAY_AGAIN = 30.0  # seconds between two lines that say so
ASSUMED_SEQUENCES = 64  # of a server that says nothing; vLLM serves 128 at least
ASSUMED_CONTEXT = 131_072  # tokens
TOKEN_IDS = 256  # every vocabulary has so many


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """`kendall serve --engine http`."""

    urls: tuple[str, ...]
    model: str | None = None  # that must be among theirs
    key: str | None = None
    tokenizer: str | None = None
    max_num_seqs: int | None = None  # of each server
    max_model_len: int | None = None


class UpstreamPool:
    """`on_change` is called with a server that was lost, was busy, was put aside or came back, and
    the reason; `on_room` with one on trial that gets more calls at once.
    """

    def __init__(
        self,
        options: HttpOptions,
        on_change: Callable[[Upstream, str], None],
        on_room: Callable[[Upstream], None],
        connect: Connect = connector,
    ) -> None:
        self._options, self._connect = options, connect
        self._on_change, self._on_room = on_change, on_room
        self._origins = frozenset(map(origin_of, options.urls))  # that get the key
        self.sender = secrets.token_hex(8)
        self._known: dict[int, Description] = {}  # of the servers that have answered
        self._turns = itertools.count()
        self._closing: set[asyncio.Task[None]] = set()
        self._urls = dict(enumerate(options.urls))  # of those that are to serve
        self._open = False  # one of them has answered since the start
        self._said: set[str] = set()
        self.upstreams: dict[int, Upstream] = {}
        self.names: tuple[str, ...] = ()  # of the models

    @property
    def serving(self) -> frozenset[int]:
        """Servers that get work."""
        working = (each.id for each in self.upstreams.values() if each.takes_work)
        return frozenset(working if self._open else ())

    @property
    def first(self) -> Upstream | None:
        """One that gets work."""
        return next((self.upstreams[each] for each in self.serving), None)

    @property
    def lost(self) -> bool:
        """Whether none of them is there."""
        return all(each.breaker.lost or each.leaving for each in self.upstreams.values())

    async def open(self) -> Capabilities:
        """Wait until one of them serves. Raises EngineStartError where they serve different
        models, and where it is the first time and none is there.
        """
        faults = {each.id: each.last_fault for each in self.upstreams.values()}
        await self.close()
        self.upstreams = {index: self._upstream(index, url) for index, url in self._urls.items()}
        for index, upstream in self.upstreams.items():
            upstream.last_fault = faults.get(index)
        absent = await self._wait()
        for upstream in self.upstreams.values():
            if upstream.id in absent:
                upstream.give_up(absent[upstream.id])
            upstream.watch()
        self._open = True
        return self.capabilities()

    async def close(self) -> None:
        """No connection is left."""
        self._open = False
        upstreams, self.upstreams = self.upstreams, {}
        await asyncio.gather(*(upstream.close() for upstream in upstreams.values()), *self._closing)

    # what becomes of their calls

    def served(self, upstream: Upstream, failed_by: Iterable[int]) -> None:
        """It answered a call, which these failed."""
        upstream.standing.succeed()
        if upstream.standing.room is not None and upstream.breaker.closed:
            upstream.standing.widen(upstream.now(), self.capabilities().max_num_seqs)
            self._on_room(upstream)
        for server_id in failed_by:
            if server_id != upstream.id and server_id in self.upstreams:
                self.failed(self.upstreams[server_id])

    def failed(self, upstream: Upstream) -> None:
        """It failed a call: it is put aside if the others are better, and those that were before
        it are recalled if they are not.
        """
        upstream.standing.fail()
        standing, better = upstream.standing, self._share_beside(upstream)
        if standing.fails and better is not None and better < standing.share / 2:
            upstream.put_aside("its calls fail, and other servers answer them")
        for other in list(self.upstreams.values()):
            share = self._share_beside(other) if other.breaker.aside else None
            if share is not None and share >= other.standing.share / 2:
                other.standing.exonerate()
                other.recall()

    def recall(self) -> None:
        """No server takes work: those that were put aside are better than none."""
        if not self.serving:
            for upstream in list(self.upstreams.values()):
                upstream.recall()

    def _share_beside(self, upstream: Upstream) -> float | None:
        """Of failures among the calls of the others that take work; None where there is none."""
        others = [
            each.standing
            for each in self.upstreams.values()
            if each is not upstream and each.takes_work
        ]
        return share_of(others) if others else None

    # other servers

    def change(self, urls: Sequence[str]) -> None:
        """These are to serve from now on. A new one gets work once it answers with the same models;
        another one gets no more, and is to be removed when it has ended what it has. Raises
        ValueError, and changes nothing, where no server would get work and one does now.
        """
        kept = {each.url: each for each in self.upstreams.values()}
        if self.serving and not any(url in kept and kept[url].breaker.closed for url in urls):
            raise ValueError(
                f"got {', '.join(urls)}, of which none serves this queue now; expected one of "
                f"{', '.join(each.url for each in kept.values() if each.takes_work)} among them: "
                "remove it once a new one serves"
            )
        for upstream in kept.values():
            if not upstream.leaving and upstream.url not in urls:
                log.info("%s (%s) is removed: it ends what it has", upstream.name, upstream.url)
            upstream.leaving = upstream.url not in urls
        for url in urls:
            if url not in kept:
                index = next(each for each in itertools.count() if each not in self.upstreams)
                log.info("server %d (%s) is new: it gets work once it answers", index, url)
                if self._options.key is not None and origin_of(url) not in self._origins:
                    log.warning(
                        "server %d (%s) is not sent --engine-api-key: its origin is none of those "
                        "of --engine-url",
                        index,
                        url,
                    )
                self.upstreams[index] = self._upstream(index, url)
                self.upstreams[index].await_answer()
        self._urls = {each.id: each.url for each in self.upstreams.values() if not each.leaving}

    def remove(self, upstream: Upstream) -> None:
        """It has nothing left to do."""
        log.info("%s (%s) was removed", upstream.name, upstream.url)
        del self.upstreams[upstream.id]
        self._known.pop(upstream.id, None)
        task = asyncio.get_running_loop().create_task(upstream.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def state_of(self, upstream: Upstream) -> str:
        """In one word, for operators."""
        if upstream.leaving:
            return "draining"
        if upstream.breaker.closed and self._open:
            return "serving"
        if upstream.breaker.busy:
            return "busy"
        if upstream.breaker.aside:
            return "put aside"
        return "lost" if upstream.id in self._known else "starting"

    def _upstream(self, index: int, url: str) -> Upstream:
        key = self._options.key if origin_of(url) in self._origins else None
        found = Upstream(
            index,
            url,
            key,
            on_change=self._on_change,
            verify=self._verify,
            models=self._same_models,
            connect=self._connect,
        )
        found.probe_headers = {SENDER: self.sender}
        return found

    # what they are

    @property
    def tokenizes(self) -> bool:
        """Whether one of them counts tokens."""
        return any(map(self._tokenizes, self.upstreams.values()))

    def tokenizing(self) -> Upstream | None:
        """One that counts tokens, each in its turn. Not one that failed to a while ago."""
        able = [each for each in self.upstreams.values() if self._tokenizes(each)]
        return able[next(self._turns) % len(able)] if able else None

    def _tokenizes(self, upstream: Upstream) -> bool:
        known = self._known.get(upstream.id)
        able = upstream.takes_work and known is not None and known.tokenizes
        return able and upstream.tokenizes_at <= upstream.now()

    async def _wait(self) -> dict[int, str]:
        """Wait until one serves; returns why the others do not."""
        first, said = not self.names, -math.inf
        now = clock_of(asyncio.get_running_loop())
        while True:
            asked = list(self.upstreams.values())
            absent = await self._looks(asked, first=first)
            for upstream in asked:
                upstream.last_fault = str(absent[upstream.id]) if upstream.id in absent else None
            if any(each.id not in absent and not each.leaving for each in asked):
                return {index: str(reason) for index, reason in absent.items()}
            if first and not any(isinstance(look, StartingError) for look in absent.values()):
                raise refusal(str(absent[asked[0].id]), asked[0].url)
            if now() - said >= SAY_AGAIN:
                said = now()
                for upstream in asked:
                    if upstream.id in absent and upstream.id in self.upstreams:
                        log.warning("waiting for %s: %s", upstream.url, absent[upstream.id])
            await asyncio.sleep(AGAIN)

    async def _looks(self, asked: Sequence[Upstream], *, first: bool) -> dict[int, Exception]:
        """Why each does not serve, of those that do not. The first time all are heard; later the
        first one that serves is enough, and one that is silent holds nobody up.
        """
        tasks = {asyncio.create_task(self._look(each, first=first)): each for each in asked}
        done: set[asyncio.Task[Exception | None]] = set()
        left = set(tasks)
        try:
            while left and (
                first or not any(task.result() is None and not tasks[task].leaving for task in done)
            ):
                ended, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                done |= ended
                for task in ended:
                    task.result()  # raises EngineStartError
        finally:
            for task in tasks:
                if task.done():
                    _ = task.cancelled() or task.exception()  # of several that fail one is raised
                task.cancel()
        absent: dict[int, Exception] = {tasks[task].id: OSError(SILENT) for task in left}
        found = {tasks[task].id: task.result() for task in done}
        return absent | {index: look for index, look in found.items() if look is not None}

    async def _look(self, upstream: Upstream, *, first: bool) -> Exception | None:
        """Why it does not serve; None where it does. Raises EngineStartError."""
        try:
            self._know(upstream, await described(upstream))
        except EngineStartError as error:
            if first:
                raise
            return error
        except (StartingError, *LOST) as error:
            return error if isinstance(error, StartingError) else OSError(reason_of(error))
        except Exception as error:
            kind = type(error).__name__
            if kind not in self._said:
                self._said.add(kind)
                log.exception("what %s says of itself cannot be read (said once)", upstream.url)
            return OSError("its answer cannot be read")
        return None

    def _know(self, upstream: Upstream, found: Description) -> None:
        """Raises EngineStartError where the other servers have other models; of one that served
        before adapters may have come or gone.
        """
        other = bool(self.names) and set(found.names) != set(self.names)
        if other and not (upstream.id in self._known and self.names[0] in found.names):
            raise EngineStartError(
                f"got {_models(found.names)} from {upstream.url}; expected {_models(self.names)}, "
                "as before or as the other --engine-url: start it with the same model, or give it "
                "a gateway of its own"
            )
        if not self.names:
            self.names = _asked_first(self._options.model, found.names, upstream.url)
        self._known[upstream.id] = found

    async def _verify(self, upstream: Upstream) -> str | None:
        try:
            self._know(upstream, await described(upstream))
        except (EngineStartError, StartingError) as error:
            if str(error) != upstream.last_fault:
                log.warning("%s is not given work: %s", upstream.name, error)
            return str(error)
        except LOST as error:
            return reason_of(error)
        return None

    @property
    def context(self) -> int:
        """Tokens: the least of all."""
        known = self._known.values()
        lengths = [each.max_model_len for each in known if each.max_model_len is not None]
        return self._options.max_model_len or min(lengths, default=ASSUMED_CONTEXT)

    async def _same_models(self, upstream: Upstream) -> str | None:
        """What is wrong with the models of one that serves; None too where it does not say. Some
        may come and go (adapters); the first one is what it was started for.
        """
        try:
            names = await named(upstream)
        except LOST:
            return None
        if not names or not self.names or self.names[0] in names:
            return None
        return f"it has {_models(names)} now; expected {_models(self.names)}"

    def capabilities(self) -> Capabilities:
        """The least capabilities of all servers, as far as they give them."""
        options, known = self._options, self._known.values()
        memories = [each.kv_cache_tokens for each in known if each.kv_cache_tokens is not None]
        return Capabilities(
            engine="http",
            model=self.names[0],
            max_model_len=self.context,
            max_num_seqs=options.max_num_seqs or self._sequences(),
            max_num_batched_tokens=UNKNOWN_TOKENS,
            kv_cache_tokens=min(memories, default=UNKNOWN_TOKENS),
            eos_token_ids=frozenset(),
            vocab_size=TOKEN_IDS,
            pads=False,
            servers=len(self._urls),
            model_names=self.names,
        )

    def _sequences(self) -> int:
        """Most sequences of each server: the least number that one of them gives."""
        said = [each.max_num_seqs for each in self._known.values() if each.max_num_seqs is not None]
        if not said:
            say_once(
                self._said,
                "assumed",
                f"no server says how many sequences it serves at once: {ASSUMED_SEQUENCES} are "
                "assumed for each; set --max-num-seqs to what they serve",
            )
            return ASSUMED_SEQUENCES
        least, most = min(said), max(said)
        if least < most:
            told = f"the servers serve {least} to {most} sequences at once"
            say_once(self._said, told, f"{told}: {least} are sent to each")
        return least


def _asked_first(asked: str | None, names: tuple[str, ...], url: str) -> tuple[str, ...]:
    """Raises EngineStartError: it is none of them."""
    if asked is None:
        return names
    if asked not in names:
        raise EngineStartError(
            f"got MODEL {asked!r}, and {_models(names)} from {url}; expected one of its models, or "
            "no MODEL"
        )
    return (asked, *(name for name in names if name != asked))


def origin_of(url: str) -> tuple[str, str, int]:
    """Scheme, host and port."""
    parts = urlsplit(url)
    return (
        parts.scheme,
        parts.hostname or "",
        parts.port or (443 if parts.scheme == "https" else 80),
    )


def _models(names: tuple[str, ...]) -> str:
    return ("model " if len(names) == 1 else "models ") + ", ".join(map(repr, names))


def say_once(said: set[str], kind: str, sentence: str) -> None:
    """A warning of a kind; `said`: the kinds so far."""
    if kind not in said:
        said.add(kind)
        log.warning("%s", sentence)
