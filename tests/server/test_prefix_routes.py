"""`route=prefix` in the gateway: what is known of prompts, where requests go, that none waits for a
server, and that without known prefixes nothing is different.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import cast

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kendall.policies import Request, parse_policy
from kendall.queueing.latency.law import parse_law
from kendall.queueing.measurement.record import Record
from kendall.server.engines.prefix_cache import BLOCK
from kendall.server.engines.proxied import PROMPT_START, ProxiedCall
from kendall.server.queue.prefixes import BLOCK_BYTES, PrefixMatches, prefix_keys
from kendall.server.queue.sequence import SequenceState
from tests.server.asgi import call, running
from tests.server.harness import driven_by_both, engine_request_of, ones, replay
from tests.server.passed import Desk, Scripted, passed
from tests.server.test_prefix_hits import common
from tests.virtual_time import run_virtual

LAW = parse_law("k1=0.0003,k2=0.0014,k3=0.00002,k4=0.0012,kp=0.00002,turnaround=0.0015")
COUNT, SESSIONS = 600, 100
BEGIN, OWN = 6 * BLOCK, 2 * BLOCK  # tokens of a session's prompts, and of one alone
LENGTHS = (1, 24)


class Asked:
    """A sequence, as far as its prompt is concerned."""

    def __init__(self, prompt: Sequence[int], salt: str | None = None) -> None:
        request = Request(id="r", arrived_at=0, prompt_tokens=len(prompt), max_output_tokens=1)
        made = engine_request_of(request, 1, lambda _: prompt)
        self.engine_request = msgspec.structs.replace(made, cache_salt=salt)
        self.prefix_keys: tuple[int, ...] | None = None


def known(most: int = 10**6) -> tuple[PrefixMatches, Callable[..., dict[int, int]]]:
    """The matches, and what they say of a prompt: blocks by server."""
    asked: dict[str, SequenceState] = {}
    matches = PrefixMatches(asked, most)

    def of(prompt: Sequence[int], salt: str | None = None) -> dict[int, int]:
        asked["r"] = cast("SequenceState", Asked(prompt, salt))
        return dict(matches["r"])

    return matches, of


def serve(matches: PrefixMatches, server: int, prompt: Sequence[int], **given: str) -> None:
    matches.serve(server, [cast("SequenceState", Asked(prompt, **given))])


prompts = st.lists(st.integers(0, 1), max_size=5 * BLOCK)


@given(st.lists(st.tuples(st.integers(0, 2), prompts), max_size=12), prompts)
def test_a_match_is_the_longest_prefix_of_whole_blocks_that_a_server_had(
    served: list[tuple[int, list[int]]], prompt: list[int]
) -> None:
    """Where it is half of the prompt's blocks or more."""
    matches, of = known()
    longest: dict[int, int] = defaultdict(int)
    for server, other in served:
        serve(matches, server, other)
        longest[server] = max(longest[server], common(prompt, other) // BLOCK)
    half = len(prompt) // BLOCK / 2
    assert of(prompt) == {
        server: blocks for server, blocks in longest.items() if blocks and blocks >= half
    }


def test_what_all_prompts_begin_with_decides_nothing() -> None:
    """A common prefix below half of a prompt would fill one server before the next."""
    matches, of = known()
    system = [1] * (2 * BLOCK)
    serve(matches, 0, system + [2] * (2 * BLOCK))
    assert of(system + [3] * (2 * BLOCK)) == {0: 2}
    assert of(system + [3] * (3 * BLOCK)) == {}


def test_prompts_of_another_salt_share_nothing() -> None:
    matches, of = known()
    serve(matches, 1, [1] * BLOCK, salt="a")
    assert (of([1] * BLOCK, salt="a"), of([1] * BLOCK), of([1] * (BLOCK - 1), salt="a")) == (
        {1: 1},
        {},
        {},
    )


def test_the_least_recently_served_is_forgotten_first_the_end_of_a_prompt_before_its_start() -> (
    None
):
    matches, of = known(most=4)
    long, short = [1] * (3 * BLOCK), [2] * BLOCK
    serve(matches, 0, long)
    serve(matches, 1, short)
    serve(matches, 2, [3] * BLOCK)  # takes the place of the last block of `long`
    assert (of(long), of(short)) == ({0: 2}, {1: 1})
    serve(matches, 0, long)
    assert (of(long), of(short)) == ({0: 3}, {})


def test_memory_is_bounded_however_many_prompts_come() -> None:
    """At its bound 65,536 blocks take 16 MB at most, whatever their prompts."""
    matches, _ = known(most=2048)
    rng = np.random.default_rng(5)
    for number in range(300):
        serve(matches, number % 64, rng.integers(0, 1000, 40 * BLOCK).tolist())
        assert len(matches._served) <= 2048
    entries = sum(sys.getsizeof(key) + sys.getsizeof(bits) for key, bits in matches._served.items())
    assert (sys.getsizeof(matches._served) + entries) / 2048 <= 16e6 / 65_536


def test_unless_it_is_told_otherwise_it_keeps_65536_blocks() -> None:
    asked: dict[str, SequenceState] = {}
    matches = PrefixMatches(asked)
    blocks = np.arange(256 * BLOCK) + 1
    first = blocks.tolist()
    for number in range(256):  # of 256 blocks each
        serve(matches, 0, (blocks + 10**6 * number).tolist())
    asked["first"] = cast("SequenceState", Asked(first))
    assert (list(matches), len(matches), matches["first"]) == (["first"], 1, {0: 256})
    serve(matches, 1, [5] * BLOCK)
    assert matches["first"] == {0: 255}


def test_only_so_much_of_a_prompt_is_looked_at() -> None:
    request = Request(id="r", arrived_at=0, prompt_tokens=10**5, max_output_tokens=1)
    assert len(prefix_keys(engine_request_of(request, 1, ones))) == 256


def test_of_a_passed_call_the_bytes_of_its_prompt_count() -> None:
    def of(start: bytes) -> tuple[int, ...]:
        made = passed("a")
        return prefix_keys(
            msgspec.structs.replace(made, call=ProxiedCall("/v1/x", b"{}", prompt_start=start))
        )

    one, other = of(b"s" * (2 * BLOCK_BYTES) + b"one"), of(b"s" * (2 * BLOCK_BYTES) + b"other")
    assert one == other
    assert len(one) == 2
    assert len(of(b"s" * PROMPT_START)) == 256
    assert len(one) == 2
    assert of(b"t" + b"s" * (2 * BLOCK_BYTES))[0] != one[0]


# in the queue


def sessions(rate: float, seed: int) -> list[tuple[Request, int]]:
    """Requests of the sessions, by chance: those of one share a prefix."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, COUNT))
    lengths, of = rng.integers(*LENGTHS, COUNT), rng.integers(0, SESSIONS, COUNT)
    return [
        (
            Request(
                id=f"{number}-{session}",
                arrived_at=float(at),
                prompt_tokens=BEGIN + OWN,
                max_output_tokens=LENGTHS[1],
            ),
            int(length),
        )
        for number, (at, length, session) in enumerate(zip(arrivals, lengths, of, strict=True))
    ]


def words(request: Request) -> list[int]:
    number, session = map(int, request.id.split("-"))
    return [10**4 + session] * BEGIN + [1 + number] * OWN


def replayed(policy: str, rate: float, servers: int = 3) -> list[Record]:
    made = replay(
        parse_policy(policy),
        sessions(rate, 3),
        LAW,
        servers=servers,
        prompt=words,
        enable_prefix_caching=1,
        kv_cache_tokens=10**5,
    )
    return sorted(run_virtual(made), key=lambda record: record.dispatched_at or 0.0)


def servers_of(records: list[Record]) -> dict[str, list[int | None]]:
    """By session."""
    found: dict[str, list[int | None]] = defaultdict(list)
    for record in records:
        found[record.request_id.split("-")[1]].append(record.server_id)
    return found


def cached(records: list[Record]) -> int:
    return sum(record.cached_tokens or 0 for record in records)


@pytest.mark.parametrize("policy", ["continuous:max_batch_size=8", "continuous"])
def test_requests_with_one_prefix_land_on_one_server_while_it_is_free(policy: str) -> None:
    records = replayed(f"{policy}{',' if ':' in policy else ':'}route=prefix", rate=20.0)
    homes = {session: set(servers) for session, servers in servers_of(records).items()}
    assert {session: len(home) for session, home in homes.items()} == dict.fromkeys(homes, 1)
    assert cached(records) == (COUNT - len(homes)) * BEGIN  # all but the first of each session
    usual = servers_of(replayed(policy, rate=20.0))
    assert max(len(set(servers)) for servers in usual.values()) == 3


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("policy", "rate"),
    [
        ("continuous:max_batch_size=2", 150.0),
        ("single", 55.0),
        ("elastic:max_batch_size=2", 85.0),
        ("capped:max_batch_size=2", 85.0),
        ("fixed:batch_size=2,max_wait=0.01", 85.0),
    ],
)
def test_more_is_cached_and_no_request_waits_while_a_server_is_free(
    policy: str, rate: float
) -> None:
    text = f"{policy}{',' if ':' in policy else ':'}route=prefix"
    routed, usual = replayed(text, rate), replayed(policy, rate)
    assert {record.outcome for record in routed} == {"completed"}
    assert {record.policy for record in routed} == {text}
    assert cached(routed) > 1.02 * cached(usual)
    assert sum(record.queueing_delay > 0 for record in routed) > COUNT / 20
    if policy.startswith("fixed"):
        return  # under which requests wait for others
    size = 1 if policy == "single" else 2
    for record in routed:
        if record.queueing_delay > 1e-9:
            assert record.dispatched_at is not None
            waited = (record.arrived_at, record.dispatched_at)
            assert free_during(routed, waited, size, joins="continuous" in policy) == []


def free_during(
    records: list[Record], waited: tuple[float, float], size: int, *, joins: bool
) -> list[tuple[float, int]]:
    """Instants within a wait, each with a server that could have taken one more."""
    arrived, dispatched = waited
    changes = [
        at
        for record in records
        for at in (record.dispatched_at, record.server_free_at)
        if at is not None and arrived < at < dispatched
    ]
    edges = [arrived, *sorted(changes), dispatched]
    middles = [(a + b) / 2 for a, b in itertools.pairwise(edges) if b - a > 1e-9]
    found = []
    for middle in middles:
        busy = [
            record.server_id
            for record in records
            if record.dispatched_at <= middle < record.server_free_at  # type: ignore[operator]
        ]
        full = size if joins else 1
        found += [(middle, server) for server in range(3) if busy.count(server) < full]
    return found


@pytest.mark.parametrize(
    ("policy", "rate"),
    [
        ("single:route=prefix", 90.0),
        ("capped:max_batch_size=8,route=prefix", 300.0),
        ("elastic:max_batch_size=3,route=prefix", 200.0),
        ("fixed:batch_size=4,max_wait=0.02,route=prefix", 150.0),
        ("continuous:max_batch_size=4,route=prefix", 300.0),
        ("continuous:max_batch_size=4,order=sprpt,route=prefix", 300.0),
    ],
)
def test_without_shared_prefixes_the_gateway_is_the_simulator(policy: str, rate: float) -> None:
    """To 1 ns, with 2 servers."""
    live, simulated = driven_by_both(policy, sessions(rate, 4), LAW, servers=2, prompt=own)
    others = {record.request_id: record for record in simulated}
    assert len(live) == len(others) == COUNT
    assert {record.server_id for record in live} == {0, 1}
    for mine in live:
        other = others[mine.request_id]
        assert (mine.server_id, mine.batch_id) == (other.server_id, other.batch_id)
        assert mine.queueing_delay == pytest.approx(other.queueing_delay, abs=1e-9)
        assert mine.sojourn_time == pytest.approx(other.sojourn_time, abs=1e-9)


def own(request: Request) -> list[int]:
    """A prompt that has nothing in common with another."""
    return [int(request.id.split("-")[0])] * request.prompt_tokens


def test_a_passed_call_goes_where_its_conversation_was() -> None:
    async def main() -> None:
        desk = Desk("continuous:max_batch_size=4,route=prefix", Scripted(servers=2))

        def ask(name: str, start: bytes) -> int:
            made = passed(name, at=asyncio.get_running_loop().time())
            desk.take(
                msgspec.structs.replace(made, call=ProxiedCall("/v1/x", b"{}", prompt_start=start))
            )
            server: int = desk.engine.dispatched[-1][0]
            return server

        talk = b"x" * (4 * BLOCK_BYTES)
        assert [
            ask("a", talk),
            ask("b", b"other" * BLOCK_BYTES),
            ask("c", talk + b"and more"),
            ask("d", b"other" * BLOCK_BYTES + b"!"),
            ask("e", talk),
            ask("f", b"new" * BLOCK_BYTES),
        ] == [0, 1, 0, 1, 0, 1]

    run_virtual(main())


def test_it_is_put_in_force_and_taken_out_while_the_gateway_serves() -> None:
    text = "continuous:max_batch_size=4,route=prefix"

    async def main() -> None:
        async with running("continuous:max_batch_size=4") as (app, gateway):
            put = await call(app, "PUT", "/admin/policy", {"policy": text})
            assert (put.status, put.json()["policy"]) == (200, text)
            assert gateway.batcher._prefixes is not None
            body = {"model": "tiny", "prompt": [1] * 40, "max_tokens": 2}
            assert (await call(app, "POST", "/v1/completions", body)).status == 200
            metrics = (await call(app, "GET", "/metrics")).body.decode()
            assert f'policy="{text}"' in metrics
            wrong = await call(app, "PUT", "/admin/policy", {"policy": "single:route=nearest"})
            assert wrong.status == 400
            assert "expected one of least_loaded, prefix" in wrong.json()["error"]["message"]
            back = {"policy": "continuous:max_batch_size=4,route=least_loaded"}
            put = await call(app, "PUT", "/admin/policy", back)
            assert put.json()["policy"] == "continuous:max_batch_size=4"
            assert gateway.batcher._prefixes is None

    run_virtual(main())
