"""Lengths of earlier epochs are used where they are of one law with this epoch's, and only
there.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kendall.policies import parse_policy
from kendall.queueing.control.assess import assess
from kendall.queueing.distributions.token_distribution import TokenDistribution, parse_distribution
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.estimation.estimates import Estimates, estimate
from kendall.queueing.estimation.lengths.lengths import Lengths, lengths
from kendall.queueing.estimation.lengths.same_lengths import (
    differ,
    lengths_from,
    prompts,
)
from kendall.queueing.estimation.window.snapshot import CENSORED, COLUMN, WITHOUT_LENGTH, Snapshot
from kendall.queueing.estimation.window_queue import QueueLimits
from kendall.queueing.latency.law import parse_law
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import simulate_run
from tests.queueing.estimation_windows import snapshot_of_run

POLICY = "dynamic"
LAW = parse_law("k1=0.0003,k2=0.0014,k3=0.00002,k4=0.0012,cv=0.1")
UNIFORM, SAME, GEOMETRIC = "uniform:low=1,high=31", "deterministic:value=16", "geometric:mean=16"


def run(law: TokenDistribution, count: int, seed: int) -> Snapshot:
    model = Queue.read(POLICY, law, LAW, max_num_seqs=16)
    return snapshot_of_run(
        simulate_run(model, 0.3 * model.largest_stable_rate, count, np.random.SeedSequence(seed)),
        model,
    )


def window(*texts: str, count: int = 1000, limit: int | None = None) -> Snapshot:
    """An epoch for each law, one after the other; the last is this one, under the limit."""
    rows, epoch_at = [], 0.0
    for epoch, text in enumerate(texts):
        now = run(parse_distribution(text, 256), count, epoch)
        part = now.rows.copy()
        for name in ("arrived_at", "dispatched_at", "server_free_at", "released_at"):
            part[:, COLUMN[name]] += epoch_at
        part[:, COLUMN["epoch"]], part[:, COLUMN["prompt_tokens"]] = epoch, 8
        if epoch == len(texts) - 1:
            last = replace(
                now,
                start=now.start + epoch_at,
                now=now.now + epoch_at,
                arrivals=now.arrivals + epoch_at,
                epoch=epoch,
                epoch_at=epoch_at,
            )
            if limit is not None:
                cut = part[:, COLUMN["output_tokens"]] > limit
                part[cut, COLUMN["output_tokens"]], part[cut, COLUMN["ending"]] = limit, CENSORED
        rows.append(part)
        epoch_at += now.now + 1.0
    return last.having(np.concatenate(rows))


def answers(seen: Snapshot, *epochs: int) -> int:
    """How many met their end."""
    return int(
        np.count_nonzero(
            np.isin(seen.column("epoch"), epochs) & (seen.column("ending") < WITHOUT_LENGTH)
        )
    )


def found(seen: Snapshot) -> Estimates:
    return estimate(seen, parse_policy(POLICY), LAW)


def test_epochs_of_one_law_are_used_together() -> None:
    seen = window(UNIFORM, UNIFORM, UNIFORM)
    told = found(seen)
    assert told.output_tokens.counts.size == answers(seen, 0, 1, 2) > 2900
    assert told.prompt_tokens.counts.size == len(seen.rows)
    (note,) = told.notes
    assert "of earlier epochs are used: they do not depend on the policy" in note


def test_a_lower_limit_is_no_other_law_and_what_lies_beyond_it_is_known_from_before() -> None:
    seen = window(UNIFORM, UNIFORM, limit=12)
    told = found(seen)
    assert told.output_tokens.counts.size == answers(seen, 0, 1)
    assert told.output_tokens.known_to == 31
    assert told.output_tokens.mean(31).value == pytest.approx(16, rel=0.05)


@pytest.mark.parametrize(
    ("before", "now"), [(UNIFORM, SAME), (SAME, UNIFORM), (UNIFORM, GEOMETRIC), (GEOMETRIC, SAME)]
)
def test_lengths_of_another_law_with_the_same_mean_are_not_used(before: str, now: str) -> None:
    seen = window(before, now)
    told = found(seen)
    assert told.output_tokens.counts.size == answers(seen, 1)
    (note,) = told.notes
    assert "of earlier epochs are not used: they differ from those that followed" in note


def test_what_lies_behind_another_law_is_not_used_either() -> None:
    seen = window(SAME, UNIFORM, SAME, SAME)
    assert found(seen).output_tokens.counts.size == answers(seen, 2, 3)
    assert lengths_from(seen) == pytest.approx(
        np.min(seen.column("dispatched_at")[seen.column("epoch") == 2])
    )


def test_prompts_that_changed_make_the_answers_before_those_of_others() -> None:
    seen = window(UNIFORM, UNIFORM)
    rows = seen.rows.copy()
    rows[rows[:, COLUMN["epoch"]] == 0, COLUMN["prompt_tokens"]] += 100
    told = found(seen.having(rows))
    assert told.output_tokens.counts.size == answers(seen, 1)
    assert told.prompt_tokens.known_to < 101


def test_an_epoch_that_has_just_begun_has_the_lengths_of_the_last() -> None:
    seen = window(SAME, UNIFORM)
    begun = replace(seen, epoch=2, epoch_at=seen.now, start=seen.now, arrivals=np.empty(0))
    assert found(begun).output_tokens.counts.size == answers(seen, 1)


def test_the_prediction_after_a_change_of_clients_is_that_of_the_new_ones() -> None:
    """On a real engine it was 57 % too large: lengths of 1 to 31 tokens, then always 16, in two
    epochs.
    """
    seen = window(UNIFORM, SAME, count=20_000)
    compared = assess(seen, LAW, QueueLimits(engine=EngineBounds(max_num_seqs=16))).compared
    assert compared.error == pytest.approx(0, abs=0.05)


def sample(law: str, count: int, seed: int) -> Lengths:
    return lengths(parse_distribution(law, 256).sample(np.random.default_rng(seed), count))


def test_samples_of_one_law_pass_and_material_differences_do_not() -> None:
    pairs = [
        (sample(GEOMETRIC, 200, seed), sample(GEOMETRIC, 3000, 1000 + seed)) for seed in range(200)
    ]
    assert sum(differ(*pair) for pair in pairs) <= 2
    assert not differ(
        sample("uniform:low=1,high=100", 100_000, 1), sample("uniform:low=1,high=104", 100_000, 2)
    )  # 4 % apart
    assert differ(
        sample("uniform:low=1,high=100", 100_000, 1), sample("uniform:low=1,high=107", 100_000, 2)
    )  # 6.5 %
    assert not differ(lengths([]), sample(SAME, 100, 3))


def share_of_twos(twos: int, count: int) -> Lengths:
    return lengths([2] * twos + [1] * (count - twos))


@pytest.mark.parametrize(
    ("one", "other", "different"),
    [
        # chance: 1.95 sqrt(1/100 + 1/100) = 0.276, and 1.95 sqrt(1/100 + 1/400) = 0.218
        ((27, 100), (0, 100), False),
        ((28, 100), (0, 100), True),
        ((21, 100), (0, 400), False),
        ((22, 100), (0, 400), True),
        ((0, 400), (22, 100), True),
        # a twentieth is no material difference
        ((4999, 100_000), (0, 100_000), False),
        ((5001, 100_000), (0, 100_000), True),
    ],
)
def test_two_samples_differ_beyond_chance_and_a_twentieth(
    one: tuple[int, int], other: tuple[int, int], different: bool
) -> None:
    assert differ(share_of_twos(*one), share_of_twos(*other)) == different


def test_samples_are_compared_as_far_as_a_tenth_of_either_is_cut() -> None:
    def cut(number: int) -> Lengths:
        return lengths(
            [30] * (200 - number) + [10] * number, [False] * (200 - number) + [True] * number
        )

    short = lengths([12] * 200)
    assert differ(cut(20), short), "all end at 30 or at 12"
    assert not differ(cut(21), short), "up to nine none ends"


def test_beyond_the_longest_answer_what_is_left_stays() -> None:
    assert lengths([1, 2, 2, 3]).survival_to(5).tolist() == [1.0, 0.75, 0.25, 0.0, 0.0, 0.0]
    assert lengths([1, 2, 2, 3]).survival_to(1).tolist() == [1.0, 0.75]


def test_only_what_the_window_carries_is_told() -> None:
    """The earlier epoch's later half."""
    seen = window(UNIFORM, UNIFORM)
    dispatched = np.sort(seen.column("dispatched_at")[seen.column("epoch") == 0])
    middle = float(dispatched[500])
    later = replace(seen, carried_from=middle)
    assert lengths_from(later) == middle
    told = found(later)
    kept = (seen.column("dispatched_at") >= middle) & (seen.column("ending") < WITHOUT_LENGTH)
    assert told.output_tokens.counts.size == np.count_nonzero(kept)
    (note,) = told.notes
    assert note.startswith(
        f"lengths of {np.count_nonzero(dispatched >= middle)} requests of earlier epochs are used"
    )
    other = replace(window(UNIFORM, SAME), carried_from=middle)
    assert lengths_from(other) == other.epoch_at


def test_a_prompt_of_no_tokens_is_no_length() -> None:
    seen = window(UNIFORM)
    rows = seen.rows.copy()
    rows[:10, COLUMN["prompt_tokens"]] = 0
    assert prompts(seen.having(rows), np.ones(len(rows), dtype=bool)).counts.size == len(rows) - 10
    older = prompts(seen, np.ones(len(rows), dtype=bool), 100.0)
    assert older.weights == pytest.approx(0.5 ** ((seen.now - seen.column("dispatched_at")) / 100))
