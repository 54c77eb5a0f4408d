"""What servers' failures and errors mean beside those of the others; calls that need no engine; how
prompts of the gateway's own are written. Each part alone.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kendall.policies import Request
from kendall.server.engines.base import EngineRequest, Sampling
from kendall.server.engines.http.own_calls import OwnForm
from kendall.server.engines.http.pool import HttpOptions, UpstreamPool, origin_of
from kendall.server.engines.http.prompts import BytesPerToken
from kendall.server.engines.http.standing import ServerStanding
from kendall.server.engines.proxied import ProxiedCall, Refused
from tests.server.upstream_stub import Stub, play, up

MIB = 1 << 20


class Member:
    """A server, as far as the pool asks."""

    def __init__(self, number: int) -> None:
        self.id, self.url, self.name = number, f"http://{number}", f"server {number}"
        self.standing = ServerStanding()
        self.breaker = SimpleNamespace(aside=False, closed=True, busy=False, lost=False)
        self.leaving = False
        self.told: list[str] = []

    @property
    def takes_work(self) -> bool:
        return self.breaker.closed and not self.leaving

    def now(self) -> float:
        return 0.0

    def put_aside(self, reason: str) -> None:
        self.told.append(reason)
        self.breaker.aside, self.breaker.closed = True, False
        self.standing.put_aside(0.0)

    def recall(self) -> None:
        self.told.append("recalled")


def pool_of(count: int, **options: Any) -> tuple[UpstreamPool, Any, list[int]]:
    rooms: list[int] = []
    made = UpstreamPool(
        HttpOptions(urls=("http://a",), **options),
        lambda *_: None,
        lambda upstream: rooms.append(upstream.id),
    )
    members = [Member(number) for number in range(count)]
    made.upstreams = dict(enumerate(members))  # type: ignore[arg-type]
    made.names = ("m",)
    return made, members, rooms


# failures


def answered(server: Member, *, good: int = 0, bad: int = 0) -> None:
    for _ in range(bad):
        server.standing.fail()
    for _ in range(good):
        server.standing.succeed()


ASIDE = "its calls fail, and other servers answer them"


def test_a_server_is_put_aside_where_the_others_share_of_failures_is_less_than_half_of_its() -> (
    None
):
    for good, aside in ((3, True), (0, False)):
        pool, (bad, other), _ = pool_of(2)
        answered(other, good=good, bad=1)
        for _ in range(2):
            pool.failed(bad)
        assert bad.told == []
        pool.failed(bad)
        assert bad.told == ([ASIDE] if aside else [])
    pool, (bad, other), _ = pool_of(2)
    answered(other, good=40)
    other.leaving = True
    for _ in range(5):
        pool.failed(bad)
    assert bad.told == [], "one that takes no work is no other server"


def test_one_that_was_put_aside_is_exonerated_where_the_others_fail_as_often() -> None:
    pool, (aside, other), _ = pool_of(2)
    answered(aside, bad=2, good=2)
    answered(other, good=40)
    aside.put_aside("x")
    aside.told.clear()
    for failures in range(1, 60):
        pool.failed(other)
        half = aside.standing.share / 2
        if aside.told:
            break
        assert other.standing.share < half, failures
    assert (aside.told, aside.standing.share, aside.standing.room) == (["recalled"], 0.0, None)


def test_an_answer_counts_against_those_that_failed_the_call_before() -> None:
    pool, servers, rooms = pool_of(3, max_num_seqs=4)
    pool.served(servers[1], failed_by=(0, 1, 7))
    assert [each.standing.share for each in servers] == [1.0, 0.0, 0.0]
    assert rooms == []
    servers[1].standing.put_aside(0.0)
    for room in (2, None):
        pool.served(servers[1], failed_by=())
        assert servers[1].standing.room == room
    assert rooms == [1, 1]
    servers[1].standing.put_aside(0.0)
    servers[1].breaker.closed = False
    pool.served(servers[1], failed_by=())
    assert servers[1].standing.room == 1, "an old answer of one that gets no work"


def test_all_that_were_put_aside_are_recalled_where_no_server_takes_work() -> None:
    pool, servers, _ = pool_of(2)
    pool.recall()
    assert [each.told for each in servers] == [["recalled"]] * 2
    for server in servers:
        server.leaving = True
    assert pool.lost
    servers[0].leaving = False
    assert not pool.lost
    servers[0].breaker.lost = True
    assert pool.lost


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://a", ("http", "a", 80)),
        ("https://a/x", ("https", "a", 443)),
        ("http://a:443", ("http", "a", 443)),
        ("https://[::1]:8000/v1", ("https", "::1", 8000)),
    ],
)
def test_an_origin_has_the_port_of_its_scheme(url: str, origin: tuple[str, str, int]) -> None:
    assert origin_of(url) == origin


# errors


OWN = {401, 403, 404, 405, 407, 408, 421, 425}  # of a server: its key, its models, its load


def test_an_error_that_may_be_a_servers_own_is_asked_of_another_one() -> None:
    async def test(stub: Stub) -> None:
        async with up(stub) as engine:
            await engine.start()
            for status in range(201, 600):
                server: Any = Member(5)
                own = status in OWN or not 400 <= status < 500
                assert engine.refused(server, status) is own, status
                assert server.standing.refusals == (400 <= status < 500)
                if 400 <= status < 500:
                    assert engine.refused(server, status), "a second one in a row"
            only: Any = Member(0)
            assert not engine.refused(only, 500), "there is no other"

    play(test)


def test_a_call_is_silent_for_too_long_beyond_the_limit_of_its_kind() -> None:
    async def test(stub: Stub) -> None:
        async with up(stub) as engine:
            await engine.start()
            asked: list[Any] = []
            exchange: Any = SimpleNamespace(
                request="r",
                call=ProxiedCall("/x", b"", most_tokens=5),
                upstream=Member(0),
                streams=True,
                flows=False,
            )
            assert not engine.too_long(exchange, 1e9), "without a limit"

            def seconds(*about: Any, **more: Any) -> float:
                asked.append((*about, more))
                return 90.0

            engine.silence_of = SimpleNamespace(least=60.0, seconds=seconds)  # type: ignore[assignment]
            assert not engine.too_long(exchange, 60.0)
            assert asked == []
            assert [engine.too_long(exchange, silent) for silent in (90.0, 90.1)] == [False, True]
            about = {"limited": True, "streams": True, "flows": False}
            assert asked == [("r", 0, about)] * 2
            exchange.call = ProxiedCall("/x", b"")
            engine.too_long(exchange, 61.0)
            assert asked[-1] == ("r", 0, about | {"limited": False})

    play(test)


# calls that need no engine


def relayed(*statuses: int | None, size: int = 2, body: int = 2) -> tuple[Any, list[int]]:
    """The answer of so many servers, None: one that is not there any more; how often each was
    asked.
    """

    async def test(*stubs: Stub) -> Any:
        async with up(*stubs) as engine:
            await engine.start()
            before = [len(stub.asked) for stub in stubs]
            for stub, status in zip(stubs, statuses, strict=True):
                stub.routes["/tokenize"] = (status or 200, b" " * size)
                if status is None:
                    stub.down()
            try:
                found.append(await engine.relay(ProxiedCall("/tokenize", b" " * body)))
            except OSError as error:
                found.append(error)
            asked.extend(
                sum(each.method == "POST" for each in stub.asked[start:])
                for stub, start in zip(stubs, before, strict=True)
            )

    found: list[Any] = []
    asked: list[int] = []
    play(test, stubs=len(statuses))
    return found[0], asked


@pytest.mark.parametrize(
    ("statuses", "status", "asked"),
    [
        ((200, 200), 200, [1, 0]),
        ((400, 200), 400, [1, 0]),
        ((404, 200), 200, [1, 1]),
        ((500, 404, 200), 404, [1, 1, 0]),
        ((None, 200), 200, [0, 1]),
        ((503, None), None, [1, 0]),
        ((None, None), None, [0, 0]),
    ],
)
def test_a_call_that_needs_no_engine_is_asked_of_two_servers_at_most(
    statuses: tuple[int | None, ...], status: int | None, asked: list[int]
) -> None:
    found, counts = relayed(*statuses)
    assert counts == asked
    if status is None:
        assert isinstance(found, ConnectionError)
    else:
        assert isinstance(found, Refused)
        assert (found.status, found.body) == (status, b"  ")


def test_its_answer_may_have_32_bytes_for_each_of_the_call_and_a_mebibyte() -> None:
    assert len(relayed(200, size=MIB + 32 * 100, body=100)[0].body) == MIB + 3200
    found, _ = relayed(200, size=MIB + 32 * 100 + 1, body=100)
    assert isinstance(found, ConnectionError)
    assert "more than 1 MiB in answer to /tokenize" in str(found)


# prompts


def test_the_ratio_forgets_a_fiftieth_with_each_prompt() -> None:
    ratio = BytesPerToken()
    ratio.learn(300, 150)  # bytes 0.98 * 4 + 0.02 * 300 = 9.92; tokens 0.98 + 0.02 * 150 = 3.98
    assert ratio.tokens(992) == 398
    assert ratio.tokens(0) == 1


def own(tokens: int, **more: Any) -> EngineRequest:
    asked = Request(id="a", arrived_at=0.0, prompt_tokens=tokens, max_output_tokens=7)
    return EngineRequest(asked, list(range(tokens)), Sampling(max_tokens=7), **more)


def words_for(tokens: int, *learned: tuple[int, int]) -> int | None:
    """Of a prompt, after prompts of so many words had so many tokens."""
    form = OwnForm()
    for words, counted in learned:
        form.answered(SimpleNamespace(words=words), counted, "no")  # type: ignore[arg-type]
    call = form.call("m", own(tokens), in_words=True)
    assert call.wanted == 7
    return call.words


@pytest.mark.parametrize(
    ("tokens", "learned", "words"),
    [
        (40, [], 40),
        (40, [(15, 60)], 40),  # too few words teach nothing
        (32, [(16, 24)], 24),  # marks around the prompt: a word is a token
        (32, [(16, 25)], 20),  # 1.5625 tokens a word: 16 + 7 / 1.5625
        (100, [(16, 20), (32, 52)], 56),  # 2 tokens a word: 16 + 80 / 2
        (100, [(32, 52), (16, 20)], 56),
        (100, [(16, 20), (31, 52)], 96),  # too near to each other
        (100, [(16, 20), (32, 20)], 96),  # nothing to be learned
        (1, [(16, 20)], 1),
    ],
)
def test_the_words_of_a_prompt_follow_the_line_through_the_shortest_and_the_longest(
    tokens: int, learned: list[tuple[int, int]], words: int
) -> None:
    assert words_for(tokens, *learned) == words


def test_without_a_count_or_over_token_ids_nothing_is_learned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    form = OwnForm()
    call = form.call("m", own(3, forced_output_tokens=2))
    assert (call.words, call.wanted) == (None, 2)
    form.answered(call, 500, None)
    assert form.call("m", own(3)).words is None
    worded = form.call("m", own(20), in_words=True)
    form.answered(worded, None, "400: no")
    assert form.call("m", own(30)).words == 30, "in words from now on"
    form.answered(worded, None, "400: no")
    assert caplog.messages == [
        "a server refused a completion over token ids with ignore_eos (400: no): calibration sends "
        "words, and max_tokens alone"
    ]
