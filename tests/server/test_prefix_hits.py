"""Prompts that the engine has computed before, in part: what the emulated engine saves, what the
records say, and that the live prediction knows.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kendall.policies import Request, SpecError, parse_policy
from kendall.queueing.control.assess import Assessment, assess
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.estimation.speed.batch_times import SLOT_ERROR
from kendall.queueing.estimation.window.window import Window
from kendall.queueing.estimation.window_queue import QueueLimits
from kendall.queueing.latency.law import parse_law
from kendall.queueing.measurement.record import Record
from kendall.server.engines.emulated import EmulatedEngine
from kendall.server.engines.prefix_cache import BLOCK, PrefixCache
from tests.server.asgi import LAW
from tests.server.harness import replay
from tests.virtual_time import run_virtual

PROMPTED = parse_law("k1=0.0003,k2=0.0014,k3=0.00002,k4=0.0012,kp=0.00002,turnaround=0.0015")
SHARED, OWN = 192, 48  # tokens at the begin of every prompt of the first kind, and behind it
COUNT = 16_000
SHARE = 0.6  # of requests with the shared begin
WITHIN = 0.05


@given(
    st.lists(st.lists(st.integers(0, 1), max_size=5 * BLOCK), max_size=12),
    st.sampled_from([1, 3, 1000]),
)
def test_a_hit_is_the_longest_begin_of_whole_blocks_that_was_there(
    prompts: list[list[int]], most: int
) -> None:
    """Against all prompts before; with little room some are forgotten."""
    cache, before = PrefixCache(most * BLOCK), list[list[int]]()
    for prompt in prompts:
        hit = cache.take(prompt)
        shared = [common(prompt, other) for other in before]
        longest = min(max(shared, default=0), max(0, len(prompt) - 1) // BLOCK * BLOCK)
        assert hit == longest if most == 1000 else hit <= longest
        assert hit % BLOCK == 0
        before.append(prompt)


def common(one: list[int], other: list[int]) -> int:
    """Tokens of the whole blocks at the begin that both have."""
    same = 0
    for start in range(0, min(len(one), len(other)) - BLOCK + 1, BLOCK):
        if one[start : start + BLOCK] != other[start : start + BLOCK]:
            break
        same += BLOCK
    return same


def test_what_was_used_last_stays_and_the_end_of_a_prompt_goes_first() -> None:
    cache = PrefixCache(4 * BLOCK)
    long, short = [1] * (3 * BLOCK + 1), [2] * (BLOCK + 1)
    cache.take(long)
    cache.take(short)
    assert cache.take([3] * (BLOCK + 1)) == 0  # takes the place of the last block of `long`
    assert cache.take(long) == 2 * BLOCK
    assert cache.take(long, salt="another tenant's") == 0


def test_a_hit_saves_its_prefill_and_is_in_the_record() -> None:
    first, again = records_of([(0.0, 161), (1.0, 161)], [7])
    assert (first.cached_tokens, again.cached_tokens) == (None, 160)
    assert (again.prompt_tokens, again.computed_tokens) == (161, 1)
    saved = (first.service_time or 0.0) - (again.service_time or 0.0)
    assert saved == pytest.approx(160 * PROMPTED.kp)


def records_of(asked: list[tuple[float, int]], token: list[int]) -> list[Record]:
    jobs = [
        (Request(id=f"r{n}-0", arrived_at=at, prompt_tokens=tokens, max_output_tokens=4), 4)
        for n, (at, tokens) in enumerate(asked)
    ]
    return run_virtual(
        replay(
            parse_policy("single"),
            jobs,
            PROMPTED,
            prompt=lambda request: token * request.prompt_tokens,
            enable_prefix_caching=1,
        )
    )


def requests_of(rate: float, seed: int) -> list[tuple[Request, int]]:
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, COUNT))
    lengths = rng.integers(1, 32, COUNT)
    own = rng.integers(1, 2 * OWN, COUNT)
    shares = rng.random(COUNT) < SHARE
    return [
        (
            Request(
                id=f"{'shared' if shares[n] else 'alone'}{n}-0",
                arrived_at=float(arrivals[n]),
                prompt_tokens=SHARED + int(own[n]),
                max_output_tokens=31,
            ),
            int(lengths[n]),
        )
        for n in range(COUNT)
    ]


def words(request: Request) -> list[int]:
    """The shared begin, or one of its own; then what no other has."""
    mine = int("".join(each for each in request.id if each.isdigit()))
    begin = [1] * SHARED if request.id.startswith("shared") else [2 + mine] * SHARED
    return begin + [2 + mine] * (request.prompt_tokens - SHARED)


def assessed(policy: str, records: list[Record], arrivals: list[float]) -> Assessment:
    window, now = Window(seconds=math.inf, most=10 * COUNT), arrivals[-1]
    window.begin_epoch(0, 0.0)
    for at in arrivals:
        window.on_arrival(at)
    for record in records:
        if record.released_at is not None and record.released_at <= now:
            window.on_record(record)
    return assess(
        window.snapshot(policy, now),
        PROMPTED,
        QueueLimits(max_output_tokens=31, engine=EngineBounds(max_num_seqs=16)),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "rate"), [("capped:max_batch_size=8", 90.0), ("continuous:max_batch_size=4", 60.0)]
)
def test_the_live_prediction_takes_the_prompts_that_were_computed(policy: str, rate: float) -> None:
    jobs = requests_of(rate, 5)
    records = run_virtual(
        replay(parse_policy(policy), jobs, PROMPTED, prompt=words, enable_prefix_caching=1)
    )
    cached = [record.cached_tokens or 0 for record in records]
    assert np.mean(cached) == pytest.approx(SHARE * SHARED, rel=0.05)
    arrivals = [request.arrived_at for request, _ in jobs]
    found = assessed(policy, records, arrivals)
    assert abs(found.compared.error) <= WITHIN, found.compared
    assert found.estimates.speed.value == pytest.approx(1.0, rel=SLOT_ERROR)
    whole = SHARED + OWN
    computed = whole - SHARE * SHARED
    assert found.estimates.prompt_tokens.mean().value == pytest.approx(computed, rel=0.03)
    unaware = [msgspec.structs.replace(record, cached_tokens=None) for record in records]
    other = assessed(policy, unaware, arrivals)
    assert other.estimates.speed.value < 0.95


def test_the_switch_is_on_or_off() -> None:
    with pytest.raises(SpecError, match="enable_prefix_caching=2; expected true or false"):
        EmulatedEngine(parse_law(LAW), enable_prefix_caching=2)
