"""A timetable is Poisson, repeats with its seed, changes with the rate by its scale alone, and
survives its file exactly.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from kendall.policies.text import SpecError
from kendall.queueing.arrivals.length_prediction import parse_length_prediction
from kendall.queueing.arrivals.processes import Poisson, Recorded
from kendall.queueing.arrivals.text import EXAMPLES, parse_arrivals
from kendall.queueing.arrivals.timetable import (
    IntArray,
    Timetable,
    delivered_rate,
    draw,
    draw_prompts,
    draw_timetable,
    load_timetable,
    save_timetable,
    split,
    streams,
    with_flows,
    with_predictions,
)
from kendall.queueing.distributions.flows import parse_flows
from kendall.queueing.distributions.token_distribution import parse_distribution

PROMPTS = parse_distribution("uniform:low=1,high=8")
OUTPUTS = parse_distribution("geometric:mean=20")


def _draw(rate: float = 10.0, n: int = 20_000, seed: int = 1) -> Timetable:
    return draw(rate, n, seed, PROMPTS, OUTPUTS)


@pytest.mark.parametrize("seed", range(4))
def test_gaps_are_exponential(seed: int) -> None:
    gaps = np.diff(_draw(seed=seed).intended_at, prepend=0.0)
    assert stats.kstest(gaps, "expon", args=(0, 0.1)).pvalue > 1e-3
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 4 / np.sqrt(gaps.size)


@pytest.mark.parametrize("window", [0.5, 2.0, 5.0])
def test_counts_are_dispersed_as_poisson_over_short_and_long_windows(window: float) -> None:
    """Pinned or rescaled schedules fall below 1 over long windows, repeated gaps rise far above
    it.
    """
    instants = _draw().intended_at
    counts = np.bincount((instants / window).astype(int))[:-1]
    statistic = counts.var(ddof=1) / counts.mean() * (counts.size - 1)
    assert 1e-3 < stats.chi2.cdf(statistic, counts.size - 1) < 1 - 1e-3


def test_the_end_is_not_pinned() -> None:
    """The last instant of N arrivals varies as a gamma variable: its coefficient of variation is
    1 / sqrt(N).
    """
    ends = np.array([_draw(n=100, seed=seed).intended_at[-1] for seed in range(300)])
    assert ends.std() / ends.mean() == pytest.approx(0.1, rel=0.2)


def test_no_instant_prefers_a_phase_of_the_second() -> None:
    assert stats.kstest(_draw().intended_at % 1.0, "uniform").pvalue > 1e-3


def test_the_same_seed_draws_the_same_timetable() -> None:
    one, two, other = _draw(seed=5), _draw(seed=5), _draw(seed=6)
    for name in ("intended_at", "prompt_tokens", "output_tokens"):
        assert np.array_equal(getattr(one, name), getattr(two, name))
        assert not np.array_equal(getattr(one, name), getattr(other, name))


def test_another_rate_only_rescales() -> None:
    slow, fast = _draw(rate=10.0), _draw(rate=40.0)
    assert np.allclose(slow.intended_at, 4 * fast.intended_at, rtol=1e-12)
    assert np.array_equal(slow.output_tokens, fast.output_tokens)
    assert np.array_equal(slow.prompt_tokens, fast.prompt_tokens)


def test_other_lengths_leave_the_arrivals_alone_and_other_prompts_the_outputs() -> None:
    one = _draw()
    two = draw(10.0, 20_000, 1, parse_distribution("deterministic:value=5"), OUTPUTS)
    assert np.array_equal(one.intended_at, two.intended_at)
    assert np.array_equal(one.output_tokens, two.output_tokens)


def test_a_longer_run_begins_as_the_shorter_one() -> None:
    short, long = _draw(n=100), _draw(n=200)
    assert np.array_equal(short.intended_at, long.intended_at[:100])
    assert np.array_equal(short.output_tokens, long.output_tokens[:100])


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert not _draw(rate=np.inf, n=10).intended_at.any()
    assert delivered_rate(np.zeros(3)) == np.inf


@pytest.mark.parametrize(
    ("rate", "n", "seed", "message"),
    [
        (0.0, 5, 0, "request rate"),
        (-1.0, 5, 0, "request rate"),
        (np.nan, 5, 0, "request rate"),
        (1.0, 0, 0, "prompts"),
        (1.0, 5, -1, "seed"),
    ],
)
def test_arguments_out_of_range_are_named(rate: float, n: int, seed: int, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        draw(rate, n, seed, PROMPTS, OUTPUTS)


def test_a_timetable_must_be_in_order_and_of_one_length() -> None:
    ones = np.ones(2, dtype=np.int64)
    with pytest.raises(ValueError, match="out of order"):
        Timetable(np.array([2.0, 1.0]), ones, ones)
    with pytest.raises(ValueError, match="one length"):
        Timetable(np.array([1.0]), ones, ones)


def test_prompts_have_the_drawn_lengths_and_stay_in_the_vocabulary() -> None:
    timetable = _draw(n=500)
    prompts = draw_prompts(timetable, 1, range(10, 50))
    assert [p.size for p in prompts] == timetable.prompt_tokens.tolist()
    ids = np.concatenate(prompts)
    assert ids.min() == 10
    assert ids.max() == 49
    assert np.array_equal(np.concatenate(draw_prompts(timetable, 1, range(10, 50))), ids)


# the streams of a seed


def test_timetables_drawn_before_today_are_drawn_still() -> None:
    """Plain numpy, as the first version drew them: a seed in an old run's header means the same
    timetable for ever.
    """
    arrivals, outputs, prompts = (
        np.random.default_rng(child) for child in np.random.SeedSequence(11).spawn(4)[:3]
    )
    table = _draw(rate=3.0, n=500, seed=11)
    assert np.array_equal(table.intended_at, np.cumsum(arrivals.exponential(size=500) / 3.0))
    assert np.array_equal(table.output_tokens, OUTPUTS.sample(outputs, 500))
    assert np.array_equal(table.prompt_tokens, PROMPTS.sample(prompts, 500))


def test_every_purpose_has_a_stream_of_its_own() -> None:
    firsts = [generator.random() for generator in streams(3)]
    assert len(set(firsts)) == len(firsts) == 11
    assert firsts != [generator.random() for generator in streams(4)]


# any process


@pytest.mark.parametrize("text", EXAMPLES.values())
def test_every_process_gives_a_timetable_that_repeats_and_begins_alike(text: str) -> None:
    def of(count: int) -> Timetable:
        return draw_timetable(
            parse_arrivals(text), count=count, seed=5, prompt_tokens=PROMPTS, output_tokens=OUTPUTS
        )

    short, long = of(100), of(300)
    assert len(long) == 300
    for name, column in short.columns().items():
        assert np.array_equal(column, getattr(long, name)[:100])


def test_a_duration_takes_what_arrives_within_it() -> None:
    table = draw_timetable(
        Poisson(10.0), duration=100.0, seed=1, prompt_tokens=PROMPTS, output_tokens=OUTPUTS
    )
    whole = _draw()
    assert len(table) == np.count_nonzero(whole.intended_at <= 100.0)
    assert np.array_equal(table.intended_at, whole.intended_at[: len(table)])


def test_no_arrival_at_all_is_an_error() -> None:
    with pytest.raises(
        SpecError,
        match=r"got no arrival of Poisson.rate=0.001. within 0.5 s; expected a longer duration",
    ):
        draw_timetable(
            Poisson(0.001), duration=0.5, seed=1, prompt_tokens=PROMPTS, output_tokens=OUTPUTS
        )


def test_recorded_instants_make_a_timetable() -> None:
    at = np.array([0.0, 1.5, 1.75])
    table = draw_timetable(Recorded(at), seed=1, prompt_tokens=PROMPTS, output_tokens=OUTPUTS)
    assert np.array_equal(table.intended_at, at)


# several senders


@pytest.mark.parametrize("text", EXAMPLES.values())
@pytest.mark.parametrize("processes", [1, 2, 4, 7])
def test_senders_together_send_the_one_timetable(text: str, processes: int) -> None:
    drawn = draw_timetable(
        parse_arrivals(text), count=101, seed=2, prompt_tokens=PROMPTS, output_tokens=OUTPUTS
    )
    table = with_predictions(drawn, parse_length_prediction("exponential"), seed=2)
    table = with_flows(table, parse_flows("a=1,b=2"), seed=2)
    shares = split(table, processes)
    index = np.concatenate(shares)
    assert sorted(index.tolist()) == list(range(101))
    assert max(share.size for share in shares) - min(share.size for share in shares) <= 1
    for name, column in table.columns().items():
        merged = np.empty_like(column)
        for share in shares:
            merged[share] = getattr(table.rows(share), name)
        assert np.array_equal(merged, column)


def test_more_senders_than_rows_leaves_some_without_work() -> None:
    assert [share.tolist() for share in split(_draw(n=2), 3)] == [[0], [1], []]
    with pytest.raises(SpecError, match="got 0 processes"):
        split(_draw(n=2), 0)


# on file


@st.composite
def _timetables(draw: st.DrawFn) -> Timetable:
    size = draw(st.integers(0, 30))
    instants = draw(hnp.arrays(np.float64, size, elements=st.floats(0, 1e9)))

    def counts() -> IntArray:
        return draw(hnp.arrays(np.int64, size, elements=st.integers(0, 2**40)))

    predicted = counts() if size and draw(st.booleans()) else None
    flow = np.resize(["a", "tenant/7"], size) if size > 1 and draw(st.booleans()) else None
    return Timetable(np.sort(instants), counts(), counts(), predicted, flow)


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(
    table=_timetables(),
    header=st.dictionaries(
        st.text(),
        st.integers() | st.text() | st.none() | st.floats(allow_nan=False, allow_infinity=False),
    ),
)
def test_a_saved_timetable_comes_back_bit_for_bit_and_is_saved_again_byte_for_byte(
    tmp_path_factory: pytest.TempPathFactory, table: Timetable, header: dict[str, object]
) -> None:
    first, second = (tmp_path_factory.mktemp("timetable") / "deep" / "t.jsonl" for _ in range(2))
    save_timetable(first, table, header)
    read_header, read = load_timetable(first)
    assert read_header == header
    assert read.columns().keys() == table.columns().keys()
    for name, column in table.columns().items():
        assert getattr(read, name).dtype == column.dtype
        assert getattr(read, name).tobytes() == column.tobytes()
    save_timetable(second, read, read_header)
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: got ''; expected a timetable, as `kendall load --save-timetable` writes it"),
        ('{"writer":"load","schema_version":1}', "got a file of load"),
        (
            '{"writer":"timetable","schema_version":2}',
            "schema version 2; expected a timetable, version 1",
        ),
        (
            '{"writer":"timetable","schema_version":1}\n{"intended_at":1.0,"prompt_tokens":1}',
            "line 2.*output_tokens",
        ),
        (
            '{"writer":"timetable","schema_version":1}\n{"intended_at":1.0,"prompt_tokens":1,"output_tokens":2}\n'
            '{"intended_at":1.0,"prompt_tokens":1,"output_tokens":2,"predicted_output_tokens":3}',
            "got a predicted length in some rows; expected one in all or in none",
        ),
        (
            '{"writer":"timetable","schema_version":1}\n{"intended_at":1.0,"prompt_tokens":1,"output_tokens":2,"flow":"a"}\n'
            '{"intended_at":1.0,"prompt_tokens":1,"output_tokens":2}',
            "got a flow in some rows; expected one in all or in none",
        ),
        (
            '{"writer":"timetable","schema_version":1}\n{"intended_at":1.0,"prompt_tokens":1,"output_tokens":2,"flow":"a\\n"}',
            "got flow 'a.n'; expected 1 to 128 printable ASCII",
        ),
        (
            '{"writer":"timetable","schema_version":1}\n{"intended_at":1.0,"prompt_tokens":1,"output_tokens":2}\n'
            '{"intended_at":0.5,"prompt_tokens":1,"output_tokens":2}',
            "out of order",
        ),
    ],
)
def test_a_file_that_is_no_timetable_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_timetable(path)
