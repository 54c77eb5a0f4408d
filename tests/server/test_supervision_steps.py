"""The parts of supervision alone: bounded waits, comparisons behind a seam, trials, refused
prompts, proofs, budgets. Virtual time.
"""

from __future__ import annotations

import asyncio
import gc
import math
import threading
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from kendall.policies import Request
from kendall.server.engines.base import EngineRequest, Sampling, Token
from kendall.server.queue import kill_trial, poison
from kendall.server.queue.continuing import DIFFERS, Replay, listener, prepare
from kendall.server.queue.kill_trial import KillTrial
from kendall.server.queue.poison import LOSSES, RejectedPrompts, ServerTrials, Trials
from kendall.server.runtime.errors import ApiError
from kendall.server.supervision import progress, restarts, supervisor
from kendall.server.supervision.bounded import OverdueError, UnendingError, within
from kendall.server.supervision.deadlines import FIRST_TOKEN, WHOLE, Deadlines, Timeouts
from kendall.server.supervision.lifecycle import EngineState, Lifecycle
from kendall.server.supervision.progress import on_still
from kendall.server.supervision.restarts import RestartBudget
from kendall.server.supervision.settings import SupervisionSettings
from kendall.server.supervision.tokenizer import MOST_AT_ONCE, RestartSafeTokenizer
from tests.virtual_time import run_virtual

LOOK, TRIAL_TOKENS, MOST_REFUSED = 0.05, 16, 1024  # seconds; tokens; prompts


def runs(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_virtual(main())


def now() -> float:
    return asyncio.get_running_loop().time()


def test_what_an_operator_gets_who_says_nothing() -> None:
    found = SupervisionSettings()
    assert (
        found.start_timeout,
        found.restart_timeout,
        found.restart_window,
        found.max_restarts,
    ) == (3600.0, 300.0, 600.0, 8)
    assert (found.max_interruptions, found.suspect_after, found.max_parked) == (3, 2, 1024)
    assert (found.stuck_timeout, found.slow_reader_timeout) == (60.0, 60.0)
    assert (
        restarts.SOUND_LIFE,
        restarts.FIRST_WAIT,
        restarts.LONGEST_WAIT,
        restarts.MOST_OVERDUE,
    ) == (10.0, 0.5, 30.0, 3)
    assert (supervisor.SOON, supervisor.LET_GO) == (2, 20.0)
    assert (kill_trial.TOKENS, kill_trial.LIMIT) == (16, 10.0)
    assert (poison.TRIAL_TOKENS, poison.LOOK, poison.REFUSED_FOR, poison.MOST_REFUSED) == (
        16,
        0.05,
        600.0,
        1024,
    )
    assert (progress.EVERY, progress.FORM_TIMES, progress.TOKENS) == (1.0, 4, 20)


# waits that end


async def takes(seconds: float, *, then: Any = "done", deaf: float = 0.0, late: Any = None) -> Any:
    """A call; `deaf`: seconds that it needs to end once it is cancelled, and then gives `late`."""
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        await asyncio.sleep(deaf)
        if late is None:
            raise
        then = late
    if isinstance(then, Exception):
        raise then
    return then


@pytest.mark.left_out
@pytest.mark.parametrize(
    ("call", "ends_at", "found"),
    [
        ({"seconds": 4.9}, 4.9, "done"),
        ({"seconds": 1.0, "then": ValueError("no")}, 1.0, ValueError),
        ({"seconds": 9.0}, 5.0, OverdueError),
        ({"seconds": 9.0, "deaf": 1.5}, 6.5, OverdueError),
        ({"seconds": 9.0, "deaf": 1.5, "late": ValueError("no")}, 6.5, OverdueError),
        ({"seconds": 9.0, "deaf": 1.5, "late": "in the end"}, 6.5, "in the end"),
        ({"seconds": 9.0, "deaf": 3.0}, 7.0, UnendingError),
    ],
)
def test_a_call_has_its_limit_and_then_its_grace(
    call: dict[str, Any], ends_at: float, found: Any
) -> None:
    complaints = list[Any]()

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, about: complaints.append(about))
        if isinstance(found, str):
            assert await within(takes(**call), 5.0, 2.0) == found
        else:
            with pytest.raises(found) as raised:
                await within(takes(**call), 5.0, 2.0)
            assert type(raised.value) is found
        assert now() == pytest.approx(ends_at)
        await asyncio.sleep(10.0)
        gc.collect()

    runs(main)
    assert complaints == []


def test_a_cancelled_wait_cancels_its_call_and_a_call_that_another_cancelled_has_failed() -> None:
    async def main() -> None:
        ended: list[float] = []

        async def call() -> None:
            try:
                await asyncio.sleep(100.0)
            finally:
                ended.append(now())

        waiting = asyncio.create_task(within(call(), 50.0, 2.0))
        await asyncio.sleep(3.0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert (waiting.cancelled(), ended) == (True, [3.0])

        async def cancels_itself() -> None:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(1.0)

        with pytest.raises(RuntimeError, match="it was cancelled"):
            await within(cancels_itself(), 5.0, 2.0)

    runs(main)


# behind a seam


class Heard:
    """A sequence as a comparison sees it; it tells what it heard."""

    def __init__(self, *ids: int, sampling: dict[str, Any] | None = None) -> None:
        self.output_token_ids = list(ids)
        self.running: Any = SimpleNamespace(output_tokens_so_far=len(ids))
        self.tokens: list[int] = []
        self.failures: list[tuple[str, str]] = []
        request = Request(id="r", arrived_at=0.0, prompt_tokens=1, max_output_tokens=9)
        self.engine_request = EngineRequest(
            request, [1], Sampling(max_tokens=9, **(sampling or {}))
        )

    def on_tokens(self, tokens: Any) -> None:
        self.tokens += [token.id for token in tokens]

    def on_failure(self, message: str, code: str = "engine_unavailable") -> None:
        self.failures.append((message, code))


def tokens(*ids: int) -> list[Token]:
    return [Token(each, "x") for each in ids]


def replaying(*ids: int) -> tuple[Replay, Any, Heard]:
    sequence, stream = Heard(*ids), SimpleNamespace(listener=None)
    return Replay(stream, sequence), stream, sequence  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pushes", "heard"),
    [
        ([(1, 2), (3,), (4,)], [[], [], []]),
        ([(1, 2), (3, 4, 5)], [[], [4, 5]]),
        ([(1, 2, 3, 4)], [[4]]),
        ([(1, 2, 3)], [[]]),
    ],
)
def test_what_the_client_has_is_dropped_and_what_follows_is_handed_on(
    pushes: list[tuple[int, ...]], heard: list[list[int]]
) -> None:
    replay, stream, sequence = replaying(1, 2, 3)
    made = 0
    for pushed, expected in zip(pushes, heard, strict=True):
        if stream.listener is sequence:
            break
        sequence.tokens = []
        replay.on_tokens(tokens(*pushed))
        made = min(3, made + len(pushed))
        assert (sequence.tokens, sequence.running.output_tokens_so_far) == (expected, made)
        assert (stream.listener is sequence) == (made == 3)
    assert sequence.failures == []


@pytest.mark.parametrize("pushes", [[(9,)], [(1, 9)], [(1,), (2,), (9,)], [(1, 2, 9, 4)]])
def test_another_token_than_the_client_has_ends_the_answer(pushes: list[tuple[int, ...]]) -> None:
    replay, stream, sequence = replaying(1, 2, 3)
    for pushed in pushes:
        replay.on_tokens(tokens(*pushed))
    assert (sequence.failures, sequence.tokens, stream.listener) == (
        [(DIFFERS, "engine_unavailable")],
        [],
        None,
    )


def test_an_answer_that_ends_or_fails_before_the_seam_has_failed() -> None:
    replay, _, sequence = replaying(1, 2, 3)
    sequence.running = None
    replay.on_tokens(tokens(1))
    replay.on_end("stop")
    replay.on_failure("gone", "engine_error")
    assert sequence.failures == [(DIFFERS, "engine_unavailable"), ("gone", "engine_error")]


def test_who_hears_a_stream_and_what_the_next_engine_gets() -> None:
    stream: Any = SimpleNamespace(listener=None)
    for ids, sampling, given, compared in (
        ((), {}, (), False),
        ((1, 2), {}, (1, 2), False),
        ((1, 2), {"seed": 3}, (), True),
    ):
        sequence: Any = Heard(*ids, sampling=sampling)
        assert prepare(sequence) is None
        assert tuple(sequence.engine_request.output_token_ids) == given
        assert isinstance(listener(stream, sequence, sequence.engine_request), Replay) == compared
    refused: Any = Heard(1, sampling={"presence_penalty": 0.5, "frequency_penalty": 0.5})
    why = prepare(refused) or ""
    assert why.startswith(
        "an answer sampled with presence_penalty and frequency_penalty cannot be continued exactly;"
    )


# who kills engines


class Suspect:
    """What trials read of a sequence."""

    def __init__(self, name: str, made: int = 0, deaths: tuple[int, ...] = ()) -> None:
        self.id, self.deaths = name, deaths
        self.output_token_ids = [0] * made
        self.stream: Any = object()
        self.outcome: str | None = None
        self.stop_detector = SimpleNamespace(finish_reason=None)
        self.at = SimpleNamespace(last_token=None)

    def __repr__(self) -> str:
        return self.id


class Tried:
    """Trials with what they did, in order."""

    def __init__(self, suspect_after: int = 2) -> None:
        self.done: list[Any] = []
        self.proofs: list[Callable[[bool], None]] = []
        self.given_back: list[int] = []
        self.trials = Trials(
            suspect_after, self.restart, lambda: self.done.append("over"), self.prove
        )  # type: ignore[arg-type]
        self.trials.on_sound = self.given_back.append

    def restart(self, sequences: Any) -> None:
        self.done.append([each.id for each in sequences])

    def prove(self, over: Callable[[bool], None]) -> Any:
        self.proofs.append(over)
        return SimpleNamespace(stop=lambda: self.done.append("proof stopped"))

    def died(self, *sequences: Suspect) -> Any:
        return self.trials.died(sequences)  # type: ignore[arg-type]

    def resume(self, *sequences: Suspect) -> None:
        self.trials.resume(sequences)  # type: ignore[arg-type]


def test_the_first_death_makes_no_suspect_and_the_second_one_alone_a_culprit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        of, one, other = Tried(), Suspect("a"), Suspect("b")
        assert of.died(one, other) is None
        of.resume(one, other)
        assert of.done == [["a", "b"], "over"]
        assert not of.trials.pauses_dispatch
        assert of.died(one) is one
        assert (of.trials.convicted, of.trials.explained) == (1, {1, 2})
        assert (one.deaths, other.deaths) == ((1,), (1,))
        of.resume(other)
        assert of.done == [["a", "b"], "over"], "first the engine proves itself"
        assert (of.trials.pauses_dispatch, of.trials.proving) == (True, True)
        of.proofs[0](True)
        assert (of.given_back, of.trials.explained, of.trials.proving) == ([2], set(), False)
        assert of.done[2:] == [["b"], "over"]

    runs(main)
    assert caplog.messages == [
        "request a killed the engine 2 times; it fails, and its prompt is refused for a while"
    ]


def test_suspects_are_tried_one_at_a_time_the_fewest_tokens_first(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        of = Tried()
        suspects = [
            Suspect("a", 9, (1, 2)),
            Suspect("b", 2, (1, 2)),
            Suspect("c", 5, (1, 2)),
            Suspect("d", 0, (2,)),
        ]
        of.resume(*suspects)
        by_name = {each.id: each for each in suspects}
        assert (of.done, of.trials.suspect) == ([["b"]], by_name["b"])
        by_name["b"].output_token_ids += [0] * (TRIAL_TOKENS - 1)
        await asyncio.sleep(3.5 * LOOK)
        assert of.done == [["b"]]
        by_name["b"].output_token_ids.append(0)
        await asyncio.sleep(LOOK)
        assert of.done == [["b"], ["c"]]
        assert by_name["b"].deaths == ()
        by_name["c"].outcome = "cancelled"
        await asyncio.sleep(LOOK)
        assert (of.done, by_name["c"].deaths) == ([["b"], ["c"], ["a"]], (1, 2)), (
            "who left is not cleared"
        )
        by_name["a"].stop_detector.finish_reason = "stop"
        await asyncio.sleep(LOOK)
        assert of.done == [["b"], ["c"], ["a"], ["d"], "over"]
        assert (of.trials.suspect, by_name["a"].deaths) == (None, ())

    runs(main)
    assert caplog.messages == [
        "3 sequences in service each saw 2 engines die: they are tried one at a time"
    ]


def test_who_left_before_its_trial_is_passed_over() -> None:
    async def main() -> None:
        of, gone, there, other = (
            Tried(),
            Suspect("a", 1, (1, 2)),
            Suspect("b", 2, (1, 2)),
            Suspect("c"),
        )
        gone.outcome = other.outcome = "cancelled"
        of.resume(gone, there, other)
        assert of.done == [["b"]]
        there.outcome = "completed"
        await asyncio.sleep(LOOK)
        assert of.done == [["b"], [], "over"]

    runs(main)


@pytest.mark.parametrize(("more", "guilty"), [(TRIAL_TOKENS - 1, True), (TRIAL_TOKENS, False)])
def test_a_death_during_a_trial_is_the_suspects_unless_it_has_made_its_tokens(
    more: int, guilty: bool
) -> None:
    async def main() -> None:
        of, suspect, other = Tried(3), Suspect("a", 7, (1, 2, 3)), Suspect("b", 9, (1, 2, 3))
        of.resume(suspect, other)
        suspect.output_token_ids += [0] * more
        assert (of.died(suspect, other) is suspect) == guilty
        assert of.trials.suspect is None
        assert suspect.deaths == ((1, 2, 3) if guilty else (1, 2, 3, 1))
        await asyncio.sleep(5 * LOOK)
        assert of.done == [["a"]], "no trial goes on"

    runs(main)


def test_who_is_not_in_the_engine_is_charged_with_no_death() -> None:
    async def main() -> None:
        of, parked, padding, served = (
            Tried(),
            Suspect("a", deaths=(1,)),
            Suspect("b", deaths=(1,)),
            Suspect("c", deaths=(1,)),
        )
        parked.stream, padding.stop_detector.finish_reason = None, "stop"
        assert of.died(parked, padding, served) is served, (
            "the only one in service, for the second time"
        )
        assert (parked.deaths, padding.deaths) == ((1,), (1,))
        alone = Suspect("d")
        assert Tried().died(alone) is None
        assert Tried(1).died(Suspect("e")).id == "e"

    runs(main)


def test_an_answer_made_since_the_last_death_proves_the_engine() -> None:
    async def main() -> None:
        of, guilty, later = Tried(1), Suspect("a"), Suspect("b")
        await asyncio.sleep(5.0)
        assert of.died(guilty) is guilty
        for last_token, given_back in ((None, []), (4.9, []), (5.0, []), (5.1, [1])):
            later.at.last_token = last_token
            of.trials.settled(later)  # type: ignore[arg-type]
            assert of.given_back == given_back
        of.trials.settled(later)  # type: ignore[arg-type]
        assert of.given_back == [1], "once"
        assert of.died(guilty) is guilty
        assert of.trials.explained == {2}, "the first one was given back"

    runs(main)


def test_a_failed_proof_gives_nothing_back_and_a_death_stops_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        of = Tried(1)
        of.died(Suspect("a"))
        of.resume(Suspect("b"))
        of.proofs[0](False)
        assert (of.given_back, of.done, of.trials.explained) == ([], [["b"], "over"], {1})
        of.resume(Suspect("c"))
        assert of.died(Suspect("d"), Suspect("e")) is None, "either of them may be the cause"
        assert of.done[2:] == ["proof stopped"]
        assert not of.trials.pauses_dispatch

    runs(main)
    assert "the engine did not complete the gateway's own request" in caplog.messages


@pytest.mark.parametrize(
    ("outcome", "given_back"), [(None, [1]), ("completed", [1]), ("cancelled", [])]
)
def test_a_suspect_that_passes_its_trial_proves_the_engine_where_its_own_proof_has_failed(
    outcome: str | None, given_back: list[int]
) -> None:
    """Not one whose client has left: the engine may have made nothing for it."""

    async def main() -> None:
        of, suspect = Tried(1), Suspect("b", deaths=(9,))
        of.died(Suspect("a"))
        of.resume(suspect)
        of.proofs[0](False)
        assert (of.done, of.given_back) == ([["b"]], [])
        suspect.output_token_ids += [0] * TRIAL_TOKENS
        suspect.outcome = outcome
        await asyncio.sleep(LOOK)
        assert (of.done, of.given_back) == ([["b"], [], "over"], given_back)

    runs(main)


def test_a_suspect_that_passes_its_trial_shows_what_a_failed_proof_did_not() -> None:
    async def main() -> None:
        of, suspect = Tried(), Suspect("b", 4, (1, 2))
        assert of.died(Suspect("a", deaths=(7,))) is not None
        of.resume(suspect)
        of.proofs[0](False)
        suspect.output_token_ids += [0] * TRIAL_TOKENS
        assert (of.done, of.given_back) == ([["b"]], [])
        await asyncio.sleep(1.5 * LOOK)
        assert (of.done, of.given_back) == ([["b"], [], "over"], [2])

    runs(main)


@pytest.mark.parametrize("together", [False, True])
def test_a_suspect_is_looked_at_from_its_own_trial_on(together: bool) -> None:
    """Not when the one before it, which a death ended, would have been; `together`: the death has
    both.
    """

    async def main() -> None:
        of, first, second = Tried(), Suspect("a", 0, (1, 2)), Suspect("b", 0, (1, 2))
        of.resume(first)
        await asyncio.sleep(0.6 * LOOK)
        dead = (first, second) if together else (first,)
        assert of.died(*dead) is first
        of.resume(second)
        of.proofs[0](True)
        second.output_token_ids += [0] * TRIAL_TOKENS
        await asyncio.sleep(0.6 * LOOK)
        assert of.done == [["a"], ["b"]]
        await asyncio.sleep(0.6 * LOOK)
        assert of.done == [["a"], ["b"], [], "over"]

    runs(main)


def test_an_operator_reads_who_killed_how_many_engines_and_that_a_proof_failed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        of = Tried()
        of.died(Suspect("poison", deaths=(1, 2)))
        of.resume()
        of.proofs[0](False)

    runs(main)
    assert caplog.messages == [
        "request poison killed the engine 3 times; it fails, and its prompt is refused for a while",
        "the engine did not complete the gateway's own request",
    ]


def test_losses_by_a_request_that_kills_are_given_back_each_to_the_server_that_was_lost() -> None:
    async def main() -> None:
        proofs, given_back = list[Callable[[bool], None]](), list[tuple[int, int]]()

        def prove(over: Callable[[bool], None]) -> Any:
            proofs.append(over)
            return SimpleNamespace()

        trials = ServerTrials(3, lambda _: None, lambda: None, prove, first_death=LOSSES)
        trials.on_forgiven = lambda *about: given_back.append(about)
        guilty: Any = Suspect("a", deaths=(LOSSES + 9, 3 * LOSSES + 1))
        assert trials.died([guilty]) is guilty, "on server 0, which is lost for the second time"
        trials.resume([])
        assert given_back == []
        proofs[0](True)
        assert sorted(given_back) == [(0, 2), (2, 1)]

    runs(main)


def engine_request(prompt: list[int], caller: str = "") -> EngineRequest:
    request = Request(id="r", arrived_at=0.0, prompt_tokens=len(prompt), max_output_tokens=4)
    return EngineRequest(request, prompt, Sampling(max_tokens=4), caller=caller)


def test_a_prompt_is_refused_to_its_caller_for_ten_minutes() -> None:
    at = [1000.0]
    rejected = RejectedPrompts(lambda: at[0])
    rejected.check([engine_request([1, 2])])
    rejected.add(engine_request([1, 2], "key"))
    assert len(rejected) == 1
    for other in (
        engine_request([1, 2]),
        engine_request([1, 2, 3], "key"),
        engine_request([2, 1], "key"),
    ):
        rejected.check([other])
    for seconds, left in ((0.0, "600 s"), (599.0, "1 s"), (599.9, "0 s")):
        at[0] = 1000.0 + seconds
        with pytest.raises(ApiError, match=f"refused for {left} more") as refused:
            rejected.check([engine_request([9]), engine_request([1, 2], "key")])
        assert (refused.value.status, refused.value.code, refused.value.param) == (
            400,
            "engine_killed",
            "prompt",
        )
    at[0] = 1600.0
    rejected.check([engine_request([1, 2], "key")])
    rejected.add(engine_request([1, 2], "key"))
    at[0] = 2199.0
    with pytest.raises(ApiError):
        rejected.check([engine_request([1, 2], "key")])


def test_the_oldest_of_many_refused_prompts_is_forgotten() -> None:
    rejected = RejectedPrompts(lambda: 0.0)
    for number in range(MOST_REFUSED):
        rejected.add(engine_request([number]))
    rejected.add(engine_request([0]))  # again: it is the newest now
    rejected.add(engine_request([MOST_REFUSED]))
    assert len(rejected) == MOST_REFUSED
    rejected.check([engine_request([1])])
    for kept in (0, 2, MOST_REFUSED):
        with pytest.raises(ApiError):
            rejected.check([engine_request([kept])])


# the gateway's own request


class Proven:
    """An engine that is asked for a proof."""

    def __init__(self, *, rejects: bool = False) -> None:
        self.rejects = rejects
        self.given: list[Any] = []
        self.cancelled: list[list[str]] = []
        self.stream = SimpleNamespace(listener=None)
        self.over: list[tuple[bool, float]] = []
        given: Any = self
        self.proof = KillTrial(given, lambda sound: self.over.append((sound, now())))

    def dispatch(self, server_id: int, requests: Any, *, padded: bool, joining: bool) -> list[Any]:
        self.given.append((server_id, requests, padded, joining))
        if self.rejects:
            raise ValueError("too long")
        return [self.stream]

    def cancel(self, ids: list[str]) -> None:
        self.cancelled.append(ids)


def test_a_proof_is_a_short_greedy_answer_of_the_first_server() -> None:
    async def main() -> None:
        of = Proven()
        ((server_id, (asked,), padded, joining),) = of.given
        assert (server_id, padded, joining) == (0, False, False)
        assert (
            asked.request.prompt_tokens,
            asked.request.max_output_tokens,
            asked.prompt_token_ids,
        ) == (8, 16, list(range(1, 9)))
        assert (
            asked.sampling.max_tokens,
            asked.sampling.temperature,
            asked.sampling.ignore_eos,
        ) == (16, 0.0, True)
        of.proof.on_tokens(tokens(*range(15)))
        assert of.over == []
        of.proof.on_tokens(tokens(1))
        assert of.over == [(True, 0.0)]
        assert (of.cancelled, of.stream.listener) == ([[asked.request.id]], None)
        of.proof.on_end("stop")
        await asyncio.sleep(20.0)
        assert of.over == [(True, 0.0)], "once"

    runs(main)


@pytest.mark.parametrize(
    ("made", "end", "sound"),
    [(1, "stop", True), (1, "length", True), (0, "stop", False), (1, "cancelled", False)],
)
def test_an_end_before_all_tokens_is_a_proof_where_there_are_some(
    made: int, end: Any, sound: bool
) -> None:
    async def main() -> None:
        of = Proven()
        of.proof.on_tokens(tokens(*range(made)))
        of.proof.on_end(end)
        assert of.over == [(sound, 0.0)]

    runs(main)


def test_silence_a_failure_and_a_rejection_are_no_proof_and_a_stopped_one_says_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        silent, failing, rejecting, stopped = Proven(), Proven(), Proven(rejects=True), Proven()
        failing.proof.on_failure("no")
        stopped.proof.stop()
        stopped.proof.on_tokens(tokens(*range(16)))
        await asyncio.sleep(9.9)
        assert (failing.over, rejecting.over, silent.over) == ([(False, 0.0)], [(False, 0.0)], [])
        await asyncio.sleep(0.2)
        assert silent.over == [(False, 10.0)]
        assert (stopped.over, stopped.cancelled) == ([], [])
        assert silent.given[0][1][0].request.id != failing.given[0][1][0].request.id
        (said,) = caplog.records
        assert said.exc_info is not None
        assert str(said.exc_info[1]) == "too long"

    runs(main)


# an answer that stands still


@pytest.mark.parametrize(
    ("continued", "reason", "said"),
    [
        (False, None, None),
        (False, "it is whole", "it is whole"),
        (True, None, "also after it was submitted again"),
    ],
)
def test_an_answer_that_stands_still_is_handed_over_again_once(
    continued: bool,
    reason: str | None,
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    again, failed, detached = list[Any](), list[Any](), list[str]()
    batcher: Any = SimpleNamespace(
        recovery=SimpleNamespace(renew=again.append), fail=lambda *about: failed.append(about)
    )
    sequence: Any = SimpleNamespace(id="a", continued=continued)
    monkeypatch.setattr(progress, "detach", lambda one: detached.append(one.id) or reason)
    on_still(batcher, sequence, 60.0)
    assert detached == ([] if continued else ["a"])
    if said is None:
        assert (again, failed, sequence.continued) == ([sequence], [], True)
        assert caplog.messages == [
            "request a got no token for 60 s; it is submitted to the engine again"
        ]
    else:
        ((who, outcome, code, words),) = failed
        assert (again, who, outcome, code) == ([], sequence, "failed", "sequence_stalled")
        assert words.endswith(f"for 60 s: {said}")
        assert f"request a got no token for 60 s and fails: {said}" in caplog.messages


# the state of the gateway


STEPS: list[tuple[str, EngineState, str | None, bool]] = [  # step, state, reason, ready after it
    ("", EngineState.STARTING, None, False),
    ("came_up", EngineState.SERVING, None, True),
    ("drain", EngineState.DRAINING, None, True),
    ("down", EngineState.RESTARTING, None, False),  # the drain goes on
    ("up", EngineState.DRAINING, None, True),
    ("reopen", EngineState.SERVING, None, True),
    ("replace_stuck_engine", EngineState.STUCK, "still", False),
    ("up", EngineState.STUCK, "still", True),  # the gateway does not know yet
    ("came_up", EngineState.SERVING, None, True),
    ("leave", EngineState.SERVING, None, True),
    ("end", EngineState.DRAINING, None, True),
    ("fail", EngineState.LOST, "gone", False),
]


def test_the_state_that_is_shown_and_its_reason() -> None:
    engine: Any = SimpleNamespace(serving=True, lost=lambda _: vars(engine).update(serving=False))
    life = Lifecycle(engine)
    words = {"replace_stuck_engine": ["still"], "fail": ["gone"]}
    for step, state, reason, ready in STEPS:
        if step in ("up", "down"):
            engine.serving = step == "up"
        elif step:
            getattr(life, step)(*words.get(step, ()))
        assert (life.state, life.reason, life.ready) == (state, reason, ready), step
        assert life.healthy == (state is not EngineState.LOST)


@pytest.mark.parametrize("step", ["leave", "end"])
def test_a_drain_is_not_undone_once_the_process_is_about_to_end(step: str) -> None:
    life = Lifecycle(SimpleNamespace(serving=True))  # type: ignore[arg-type]
    life.drain()
    life.reopen()
    assert not life.draining
    life.drain()
    getattr(life, step)()
    with pytest.raises(ApiError, match="cannot be undone"):
        life.reopen()
    assert life.draining


# what is asked of an engine before anything queues


def test_each_question_goes_to_the_engine_as_it_was_asked_and_is_made_steadily() -> None:
    async def main() -> None:
        results, threads = list[Any](), list[bool]()

        async def made(call: Callable[[], Any]) -> Any:
            results.append(await call())
            return results[-1]

        def decode(token_ids: Any) -> str:
            threads.append(threading.current_thread() is threading.main_thread())
            return "x" * len(token_ids)

        async def answered(*about: Any, **more: Any) -> Any:
            return (*about, more)

        engine: Any = SimpleNamespace(
            encode=answered, encode_chat=answered, check_sampling=answered, decode=decode
        )
        supervisor: Any = SimpleNamespace(across_restarts=made)
        asked, of = Sampling(max_tokens=3), RestartSafeTokenizer(engine, supervisor)
        assert await of.encode("a") == ("a", {"special_tokens": True})
        assert await of.encode("a", special_tokens=False) == ("a", {"special_tokens": False})
        assert await of.encode_chat([{"role": "user"}], {"b": 1}) == (
            [{"role": "user"}],
            {"b": 1},
            {},
        )
        assert await of.check_sampling(asked) == (asked, {})
        assert [
            len(await of.decode(range(count))) for count in (1, MOST_AT_ONCE, MOST_AT_ONCE + 1)
        ] == [1, MOST_AT_ONCE, MOST_AT_ONCE + 1]
        assert (threads, len(results)) == ([True, True, False], 7), "a long one in a thread"

    asyncio.run(main())


# when it is started again


def test_a_life_of_ten_seconds_is_sound_and_a_loss_as_old_as_the_window_is_forgotten() -> None:
    short, sound = RestartBudget(9, math.inf, 30.0), RestartBudget(9, math.inf, 30.0)
    for budget, life, wait in ((short, 9.99, 0.5), (sound, 10.0, 0.0)):
        assert budget.next_wait(100.0, 0.0) == 0.0
        assert budget.next_wait(200.0, 200.0 - life) == wait
    for gap, allowed in ((99.9, False), (100.0, True)):
        budget = RestartBudget(1, 100.0, 30.0)
        assert budget.next_wait(1000.0, 0.0) == 0.0
        assert (budget.next_wait(1000.0 + gap, 1000.0) is not None) == allowed


def test_a_few_forgiven_losses_leave_the_others_and_the_waits_of_a_row() -> None:
    budget = RestartBudget(4, 1e9, 30.0)
    assert [budget.next_wait(float(at), None) for at in range(3)] == [0.0, 0.5, 1.0]
    budget.forgive(1)
    assert [budget.next_wait(10.0 + at, None) for at in range(3)] == [1.0, 2.0, None]
    budget.forgive(2)
    assert budget.next_wait(20.0, None) == 1.0


def test_starts_out_of_time_double_the_next_limit_from_the_longest_start_that_succeeded() -> None:
    budget = RestartBudget(9, math.inf, 30.0)
    budget.came_up(40.0)
    budget.came_up(35.0)
    assert budget.start_limit() == 40.0
    budget.next_wait(1.0, None, overdue=True)
    budget.next_wait(2.0, None)
    assert budget.start_limit() == 80.0
    assert RestartBudget(9, math.inf, 0.5).start_limit() == 0.5


# limits of a call


def test_limits_are_those_that_there_are_the_shortest_first() -> None:
    assert Timeouts(3.0, 2.0).limits() == [(2.0, FIRST_TOKEN), (3.0, WHOLE)]
    assert Timeouts(3.0).limits() == [(3.0, WHOLE)]
    assert Timeouts().limits() == []


def test_the_first_token_and_the_whole_answer_have_their_own_timers() -> None:
    async def main() -> None:
        failed: list[tuple[Any, ...]] = []
        batcher: Any = SimpleNamespace(
            fail=lambda sequence, outcome, code, message: failed.append(
                (sequence, outcome, code, now(), message)
            )
        )
        made, waiting, done = (
            SimpleNamespace(at=SimpleNamespace(first_token=first)) for first in (0.5, None, None)
        )
        choices: Any = [
            SimpleNamespace(sequence=sequence, done=sequence is done)
            for sequence in (made, waiting, done)
        ]
        choices.append(SimpleNamespace(sequence=None, done=False))
        Deadlines(batcher, Timeouts(3.0, 2.0), choices, 1.0)
        await asyncio.sleep(2.9)
        assert failed == []
        await asyncio.sleep(2.0)
        assert [entry[:4] for entry in failed] == [
            (waiting, "failed", FIRST_TOKEN, 3.0),
            (made, "failed", WHOLE, 4.0),
            (waiting, "failed", WHOLE, 4.0),
        ]
        assert "within 2 s" in failed[0][4]
        assert "within 3 s" in failed[1][4]
        closed = Deadlines(batcher, Timeouts(3.0), choices, now())
        closed.close()
        assert all(
            timer.cancelled() for timer in closed._timers
        )  # a timer would keep the call in memory
        await asyncio.sleep(5.0)
        assert len(failed) == 3

    runs(main)


def test_a_call_before_its_queue_has_the_shorter_of_its_limits() -> None:
    async def main() -> None:
        assert await Timeouts(3.0, 2.0).bound(takes(1.9), 0.0) == "done"
        with pytest.raises(ApiError, match="within 2 s") as caught:
            await Timeouts(3.0, 2.0).bound(takes(9.0), 1.9)
        assert (caught.value.status, caught.value.code, now()) == (
            504,
            FIRST_TOKEN,
            pytest.approx(3.9),
        )
        with pytest.raises(TimeoutError):
            await Timeouts(3.0).bound(takes(0.1, then=TimeoutError()), now())

    runs(main)
