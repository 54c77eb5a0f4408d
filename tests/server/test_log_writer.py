"""A log that nobody reads costs lines, counted, and nothing else; one kind of line cannot fill
it.
"""

from __future__ import annotations

import fcntl
import io
import logging
import math
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from kendall.server.runtime import log_writer, logs
from kendall.server.runtime.log_writer import (
    LINES_OF_A_KIND,
    PROMPT,
    QUEUE_BYTES,
    WINDOW,
    LogWriter,
    Repeats,
    let_go,
    to_stream,
    write_all,
)
from kendall.server.telemetry.metrics import Metrics

LONG = "x" * 10_000


class Pipe:
    """A log whose reader reads when it is told to, and the time that the writer sees."""

    def __init__(self) -> None:
        self.outgoing, self.incoming = os.pipe()
        self.now = 0.0
        self.writer = LogWriter(partial(write_all, self.incoming), now=lambda: self.now)
        self.log = logging.Logger("test")
        self.log.addHandler(self.writer)
        self._read = bytearray()
        self._reading = threading.Thread(target=self._read_all)

    def read(self) -> None:
        self._reading.start()

    def lines(self) -> list[str]:
        """Once everything is written."""
        assert self.writer.written(30)
        os.close(self.incoming)
        self._reading.join()
        return self._read.decode().splitlines()

    def _read_all(self) -> None:
        while chunk := os.read(self.outgoing, 1 << 16):
            self._read += chunk
        os.close(self.outgoing)


@pytest.fixture
def pipe() -> Pipe:
    return Pipe()


def test_unread_lines_are_dropped_and_counted_and_the_next_one_read_says_so(pipe: Pipe) -> None:
    sent = 2 * QUEUE_BYTES // len(LONG)
    for number in range(sent):
        pipe.log.warning(PROMPT, number, LONG)  # returns, though nobody reads
    dropped = pipe.writer.dropped["blocked"]
    pipe.read()
    *written, last = pipe.lines()
    assert dropped > sent / 3
    assert len(written) + dropped == sent
    numbers = [int(line.split()[1][:-1]) for line in written]
    assert numbers == sorted(set(numbers)), "in order"
    assert numbers[: sent // 4] == list(range(sent // 4)), (
        "the oldest ones; later ones where the pipe took some in the meantime"
    )
    assert last == f"{dropped} log lines were dropped because they could not be written"


def test_a_line_larger_than_the_queue_is_written(pipe: Pipe) -> None:
    pipe.read()
    pipe.log.warning("y" * (2 * QUEUE_BYTES))
    assert [len(line) for line in pipe.lines()] == [2 * QUEUE_BYTES]


def test_one_kind_of_line_has_a_rate_and_the_rest_is_one_line(pipe: Pipe) -> None:
    pipe.read()
    for number in range(1_050):
        pipe.log.warning("Invalid HTTP request received from %d.", number)
    pipe.log.error("another kind")
    assert pipe.writer.dropped["repeated"] == 1_050 - LINES_OF_A_KIND
    pipe.now = WINDOW
    for _ in range(2):
        pipe.log.warning("Invalid HTTP request received from %d.", -1)
    lines = pipe.lines()
    said = [line for line in lines if "more lines of" in line]
    assert said == [
        (
            f"{1_050 - LINES_OF_A_KIND} more lines of test like this within {WINDOW:g} s: Invalid "
            "HTTP request received from %d."
        )
    ]
    assert lines.count("Invalid HTTP request received from -1.") == 2
    assert len([line for line in lines if line.startswith("Invalid")]) == LINES_OF_A_KIND + 2
    assert "another kind" in lines


def test_a_slow_stream_of_one_kind_is_never_cut() -> None:
    repeats, record = Repeats(), logging.LogRecord("a", logging.INFO, "", 0, "line", (), None)
    assert all(
        repeats.admit(record, at * WINDOW / LINES_OF_A_KIND) for at in range(10 * LINES_OF_A_KIND)
    )


def line(text: str, logger: str = "a", level: int = logging.INFO) -> logging.LogRecord:
    return logging.LogRecord(logger, level, "", 0, text, (), None)


def test_fifty_lines_of_a_kind_are_admitted_from_the_first_one_on_for_ten_seconds() -> None:
    repeats = Repeats()
    admitted = [repeats.admit(line("x"), 100.0) for _ in range(LINES_OF_A_KIND)]
    assert all(admitted)
    assert repeats.next_end() is None, "nothing is left out"
    assert [repeats.admit(line("x"), 105.0) for _ in range(3)] == [False] * 3
    for other in (line("y"), line("x", "b"), line("x", level=logging.ERROR)):
        assert repeats.admit(other, 105.0), "of another kind"
    assert repeats.next_end() == 100.0 + WINDOW
    assert repeats.left_out(100.0 + WINDOW - 0.01) == {}
    assert repeats.left_out(100.0 + WINDOW) == {("a", logging.INFO, "x"): 3}
    assert repeats.left_out(100.0 + WINDOW) == {}
    assert repeats.next_end() is None


def test_a_line_behind_a_window_begins_another_and_what_was_left_out_is_to_be_told() -> None:
    repeats = Repeats()
    for _ in range(LINES_OF_A_KIND + 2):
        repeats.admit(line("x"), 0.0)
    assert repeats.admit(line("x"), WINDOW)
    assert repeats.next_end() == -math.inf
    for _ in range(LINES_OF_A_KIND):
        repeats.admit(line("x"), 1.5 * WINDOW)
    assert repeats.left_out(1.5 * WINDOW) == {("a", logging.INFO, "x"): 2}
    assert repeats.left_out(2 * WINDOW) == {("a", logging.INFO, "x"): 1}


def test_a_kind_is_told_by_two_hundred_characters() -> None:
    repeats, same, other = Repeats(), "x" * 200, "x" * 199
    for _ in range(LINES_OF_A_KIND):
        repeats.admit(line(same), 0.0)
    assert not repeats.admit(line(same + "y"), 0.0)
    assert repeats.admit(line(other + "y"), 0.0)


def test_kinds_beyond_the_most_are_one_until_windows_are_over() -> None:
    repeats = Repeats()
    for number in range(log_writer.MOST_KINDS):
        assert repeats.admit(line(f"line {number}"), 0.0)
    admitted = [repeats.admit(line(f"more {number}"), 1.0) for number in range(60)]
    assert admitted == [True] * LINES_OF_A_KIND + [False] * 10
    assert repeats.admit(line("more"), WINDOW), "there is room again"
    assert repeats.left_out(1.0 + WINDOW) == {("a", logging.INFO, "(lines of many kinds)"): 10}


def test_a_stream_without_a_descriptor_is_written_to() -> None:
    stream = io.StringIO()
    to_stream(stream)(b"a line\n")
    assert stream.getvalue() == "a line\n"


def test_a_process_whose_log_nobody_reads_writes_nowhere_from_its_end_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(log_writer, "LAST_LINES", 0.01)
    reads = threading.Event()
    with (tmp_path / "log").open("w") as stream:
        writer = LogWriter(lambda _: reads.wait())
        writer.emit(line("a line"))
        let_go(writer, stream)
        assert not writer.written(30.0), "nothing waits any more"
        stream.write("last words")
    assert (tmp_path / "log").read_text() == ""
    reads.set()


def test_a_log_that_is_read_is_written_to_its_end(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as stream:
        writer = LogWriter(to_stream(stream))
        writer.emit(line("a line"))
        let_go(writer, stream)
        stream.write("last words")
    assert (tmp_path / "log").read_text() == "a line\nlast words"


def test_the_table_of_kinds_has_a_bound_and_knows_what_it_left_out() -> None:
    repeats = Repeats()
    records = [
        logging.LogRecord("a", logging.INFO, "", 0, f"line {number}", (), None)
        for number in range(10 * log_writer.MOST_KINDS)
    ]
    admitted = sum(repeats.admit(record, 0.0) for record in records)
    assert len(repeats._windows) <= log_writer.MOST_KINDS + 1
    assert admitted + sum(repeats.left_out(WINDOW).values()) == len(records)
    assert repeats.admit(records[-1], WINDOW)
    assert len(repeats._windows) == 1, "windows that are over are forgotten"


def test_what_log_prompts_asks_for_is_written_every_time(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "log", pipe.log)
    pipe.read()
    for number in range(3 * LINES_OF_A_KIND):
        logs.log_prompt(str(number), SimpleNamespace(prompt="hello"))  # type: ignore[arg-type]
    assert len(pipe.lines()) == 3 * LINES_OF_A_KIND


def test_a_line_that_cannot_be_formatted_or_encoded_is_told(pipe: Pipe) -> None:
    pipe.read()
    pipe.log.warning("%d requests", "many")
    pipe.log.warning("a lone surrogate: \ud800")
    first, second = pipe.lines()
    assert "could not be formatted (TypeError): '%d requests'" in first
    assert second == "a lone surrogate: \\ud800"


def test_a_log_that_cannot_be_written_is_counted_and_said_once_it_can() -> None:
    broken, written = True, list[bytes]()

    def write(data: bytes) -> None:
        if broken:
            raise OSError(28, "No space left on device")
        written.append(data)

    writer = LogWriter(write)
    log = logging.Logger("test")
    log.addHandler(writer)
    log.warning("one")
    log.warning("two")
    assert writer.written(30)
    broken = False
    log.warning("three")
    assert writer.written(30)
    assert writer.dropped["unwritable"] == 2
    assert written == [b"three\n", b"2 log lines were dropped because they could not be written\n"]


def test_a_library_that_closes_every_handler_does_not_end_the_log(pipe: Pipe) -> None:
    """`logging.config.dictConfig` does, and vLLM calls it while the gateway runs."""
    pipe.read()
    pipe.log.warning("before")
    pipe.writer.close()
    pipe.log.warning("after")
    assert pipe.lines() == ["before", "after"]


def test_a_pipe_that_does_not_block_loses_nothing(pipe: Pipe) -> None:
    """Some supervisors hand over such a one."""
    fcntl.fcntl(pipe.incoming, fcntl.F_SETFL, os.O_NONBLOCK)
    for number in range(100):
        pipe.log.warning(f"{number} {LONG}")
    pipe.read()
    assert len(pipe.lines()) == 100


NOBODY_READS = """
import logging, sys
from kendall.server.runtime.logs import LogSettings, configure_logs, end_logs

configure_logs(LogSettings(format="json"))
for number in range(2000):
    logging.warning(f"{number} " + "x" * 1000)
end_logs()
sys.stderr.write("y" * 1_000_000)  # somebody else's last words
sys.stderr.flush()
"""


@pytest.mark.slow
def test_a_process_whose_log_nobody_reads_ends() -> None:
    with subprocess.Popen([sys.executable, "-c", NOBODY_READS], stderr=subprocess.PIPE) as process:
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert process.stderr.readline().startswith(b'{"time"')


FORKS = """
import logging, os
from kendall.server.runtime.logs import LogSettings, configure_logs, end_logs

configure_logs(LogSettings())
logging.warning("the parent")
end_logs()
if os.fork() == 0:
    logging.warning("the child")
    end_logs()
    os._exit(0)
os.wait()
"""


def test_a_forked_child_writes_its_own_lines() -> None:
    found = subprocess.run(
        [sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=60, check=True
    )
    assert [line.split("  ")[-1] for line in found.stderr.splitlines()] == [
        "the parent",
        "the child",
    ]


FOR_VLLM = """
import json, os
from kendall.server.runtime.logs import LogSettings, configure_logs

configure_logs(LogSettings(format="json"))
path = os.environ["VLLM_LOGGING_CONFIG_PATH"]
if os.fork() == 0:
    raise SystemExit
os.wait()
with open(path) as file:
    print(path, json.load(file)["loggers"]["vllm"]["handlers"])
"""


def test_the_file_that_vllm_reads_about_its_log_is_gone_with_the_process_that_wrote_it() -> None:
    """Not with a child that it forked."""
    found = subprocess.run(
        [sys.executable, "-c", FOR_VLLM], capture_output=True, text=True, timeout=60, check=True
    )
    path, handlers = found.stdout.split(maxsplit=1)
    assert handlers == "['stderr']\n"
    assert not Path(path).exists()


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> LogWriter:
    writer = LogWriter(lambda _: None)
    monkeypatch.setattr(logs, "_writers", [writer])
    return writer


def test_the_metric_counts_by_reason(configured: LogWriter) -> None:
    configured.dropped["blocked"] = 3
    text = Metrics().exposition().decode()
    assert "# TYPE kendall_dropped_log_lines_total counter" in text
    assert 'kendall_dropped_log_lines_total{reason="blocked"} 3.0' in text
    assert 'kendall_dropped_log_lines_total{reason="repeated"} 0.0' in text


def test_vllms_own_lines_in_this_process_go_the_same_way(configured: LogWriter) -> None:
    logger = logging.getLogger("vllm.test.route")
    logger.addHandler(logging.StreamHandler())
    logger.propagate = False
    logs.route(logger.name)
    assert (logger.handlers, logger.propagate) == ([], True)
