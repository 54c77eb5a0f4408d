"""The committed grid of continuous batching is what the formula says today, and no cell that the
formula trusts is off by more than 5 %.
"""

import pytest

from bench.continuous_grid import BORDER, FILE, LENGTHS, MEANS, cells, kept, table
from queueing.models.slots.continuous import solve_continuous

ROWS = kept()


def test_the_grid_is_whole() -> None:
    assert {row.cell for row in ROWS} == set(cells())
    assert len(ROWS) >= 250


def test_no_trusted_mean_is_off_by_more_than_the_border() -> None:
    assert [row.cell for row in ROWS if abs(row.worst) > BORDER and not row.doubted] == []


def test_the_doubt_is_no_blanket() -> None:
    """Of cells with a deviation that is known well most are trusted, and most doubted are wrong by
    more than those.
    """
    doubted = [abs(row.worst) for row in ROWS if row.doubted]
    trusted = [abs(row.worst) for row in ROWS if not row.doubted]
    assert len(trusted) > 2 * len(doubted)
    assert sum(doubted) / len(doubted) > 2 * sum(trusted) / len(trusted)


@pytest.mark.parametrize("place", [0, 77, 210, 333, 519])
def test_the_file_has_the_values_of_today_s_formula(place: int) -> None:
    lines = FILE.read_text().splitlines()
    line = dict(zip(lines[0].split(","), lines[1 + place].split(","), strict=True))
    cell = ROWS[place].cell
    model = cell.model
    queue = solve_continuous(model.slot_time, cell.load * model.largest_stable_rate, cell.slots)
    for name in MEANS:
        assert getattr(queue, name) == pytest.approx(float(line[f"formula_{name}"]), rel=1e-4)


def test_the_table_has_a_row_for_each_law_of_lengths() -> None:
    assert [line.split("|")[1].strip() for line in table(ROWS).splitlines()[2:12]] == list(LENGTHS)
