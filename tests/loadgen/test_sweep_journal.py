"""The journal: what was appended is there, whatever a kill does to the last line; what it says
of a cell.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kendall.loadgen.sweep.gateway import records_since
from kendall.loadgen.sweep.journal import Journal, SweepProgress, damage, digest, read_journal
from kendall.loadgen.sweep.plan import SweepPlan, load_plan, save_plan
from kendall.loadgen.sweep.store import Store
from kendall.policies.text import SpecError
from kendall.queueing.errors import CommandError
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.profile import Profile
from kendall.queueing.measurement.record import Header, Record, to_line, write_run


def journal_of(path: Path, *events: tuple[str, dict[str, object]]) -> Journal:
    """Written and closed."""
    journal = Journal(path)
    for event, fields in events:
        journal.append(event, **fields)
    journal.close()
    return journal


STORY: tuple[tuple[str, dict[str, object]], ...] = (
    ("sweep", {"resumed": False}),
    ("planned", {"cell": "a"}),
    ("planned", {"cell": "b"}),
    ("started", {"cell": "a", "attempt": 1}),
    ("done", {"cell": "a", "ended": "complete", "files": {}}),
    ("started", {"cell": "b", "attempt": 1}),
    ("cut", {"cell": "b", "reason": "killed", "files": {}}),
    ("started", {"cell": "b", "attempt": 2}),
)


def test_a_journal_reads_back_as_it_was_written(tmp_path: Path) -> None:
    journal = journal_of(tmp_path / "journal.jsonl", *STORY)
    found = read_journal(tmp_path / "journal.jsonl")
    assert [(event["event"], event.get("cell")) for event in found] == [
        (kind, fields.get("cell")) for kind, fields in STORY
    ]
    assert found == journal.events


@pytest.mark.parametrize("lost", range(1, 40, 3))
def test_a_torn_last_line_is_dropped_and_written_over(tmp_path: Path, lost: int) -> None:
    path = tmp_path / "journal.jsonl"
    journal_of(path, *STORY)
    path.write_bytes(path.read_bytes()[:-lost])
    journal = Journal(path)
    assert len(journal.events) == len(STORY) - 1
    journal.append("started", cell="b", attempt=3)
    journal.close()
    found = read_journal(path)
    assert [event["event"] for event in found] == [kind for kind, _ in STORY]
    assert found[-1]["attempt"] == 3


def test_a_broken_line_in_the_middle_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal_of(path, *STORY)
    path.write_bytes(path.read_bytes().replace(b'{"event":"cut"', b'{"event":', 1))
    with pytest.raises(ValueError, match="line 7"):
        read_journal(path)


def test_progress_says_what_became_of_every_cell(tmp_path: Path) -> None:
    events = journal_of(tmp_path / "journal.jsonl", *STORY).events
    progress = SweepProgress.fold(events)
    assert progress.of("a").done == events[4]
    assert (progress.of("b").done, progress.of("b").attempts, progress.of("b").open) == (
        None,
        2,
        events[-1],
    )
    assert SweepProgress.fold(events[:-1]).of("b").reason == "killed"
    assert progress.of("c").attempts == 0
    progress.apply({"event": "damaged", "cell": "a", "reason": "gone"})
    assert (progress.of("a").done, progress.of("a").reason) == (None, "gone")


def test_damage_is_a_file_that_is_gone_or_changed(tmp_path: Path) -> None:
    path = tmp_path / "cell.jsonl"
    path.write_text("records\n")
    done = {"files": {"cell.jsonl": digest(path)}}
    assert damage(tmp_path, done) is None
    path.write_text("record\n")
    assert "not as it was written" in (damage(tmp_path, done) or "")
    path.unlink()
    assert "missing" in (damage(tmp_path, done) or "")


def test_a_folder_of_another_plan_or_of_something_else_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    Store.open(folder, SweepPlan(loads=(0.3,), duration=2.0)).journal.close()
    again = Store.open(folder, SweepPlan(loads=(0.3,), duration=2.0))
    again.append("started", cell="x", attempt=1)
    again.journal.close()
    with pytest.raises(
        SpecError, match=r"duration: 2\.0 there, 3\.0 here.*--output, or delete .*sweep"
    ):
        Store.open(folder, SweepPlan(loads=(0.3,), duration=3.0))
    with pytest.raises(
        SpecError,
        match=r"max_output_tokens: none there, 16, none here; num_prompts: none there, 9 here;",
    ):
        Store.open(folder, SweepPlan(loads=(0.3,), num_prompts=9, max_output_tokens=(16, None)))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(SpecError, match="expected an empty folder"):
        Store.open(tmp_path / "other", SweepPlan(loads=(0.3,)))


def test_a_folder_without_a_measured_cell_takes_another_plan(tmp_path: Path) -> None:
    first = Store.open(tmp_path / "sweep", SweepPlan(loads=(0.3,), duration=2.0))
    first.append("calibrated", law="k4=1")
    first.journal.close()
    second = Store.open(tmp_path / "sweep", SweepPlan(loads=(0.3,), duration=3.0))
    second.journal.close()
    assert load_plan(tmp_path / "sweep/plan.json").duration == 3.0
    assert second.journal.events == []  # nor the law of the other


def test_a_folder_whose_cells_all_failed_takes_another_plan(tmp_path: Path) -> None:
    first = Store.open(tmp_path / "sweep", SweepPlan(loads=(0.3,), duration=2.0))
    first.append("started", cell="x", attempt=1)
    assert not first.is_unmeasured()
    first.append("failed", cell="x", reason="no request was completed")
    assert first.is_unmeasured()
    first.journal.close()
    Store.open(tmp_path / "sweep", SweepPlan(loads=(0.3,), duration=3.0)).journal.close()
    assert load_plan(tmp_path / "sweep/plan.json").duration == 3.0


def test_records_of_a_file_that_another_gateway_writes_now_are_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "gateway.jsonl"
    records = [Record(request_id=str(i), outcome="completed", epoch=i % 2) for i in range(6)]
    write_run(path, Header(writer="gateway"), records)
    offset = len(to_line(Header(writer="gateway"))) + len(to_line(records[0]))
    assert [record.request_id for record in records_since(path, offset, 1)] == ["1", "3", "5"]
    with path.open("ab") as file:
        file.write(to_line(Record(request_id="7", outcome="completed", epoch=1))[:-9])
    assert len(records_since(path, offset, 1)) == 3, "the last line is not whole"
    assert records_since(path, offset + 3, 1) == []
    assert records_since(path, 10**6, 1) == []


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")
def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """The journal, and each file that first has another name."""
    store = Store.open(tmp_path / "sweep", SweepPlan(loads=(0.5,)))
    store.journal.close()
    store.journal._file = FULL.open("wb", buffering=0)
    with pytest.raises(
        CommandError, match=r"^cannot write .*/journal\.jsonl: No space left on device$"
    ):
        store.append("finished")
    store.journal.close()
    for name, write in (
        ("profile.json", lambda: store.write_profile(Profile(name="x", law=LatencyModel(k4=1.0)))),
        ("sweep.json", lambda: store.write_json("sweep.json", {})),
        (
            "cells/a.partial-1.gateway.jsonl",
            lambda: store.write_gateway_side("a", 1, Header(writer="gateway"), []),
        ),
    ):
        (new := tmp_path / "sweep" / f"{name}.new").parent.mkdir(exist_ok=True)
        new.symlink_to(FULL)
        with pytest.raises(
            CommandError,
            match=rf"^cannot write .*/{re.escape(name)}(\.new)?: No space left on device$",
        ):
            write()
    (tmp_path / "plan.json").symlink_to(FULL)
    with pytest.raises(CommandError, match=r"^cannot write .*/plan\.json: "):
        save_plan(tmp_path / "plan.json", SweepPlan(loads=(0.5,)))
