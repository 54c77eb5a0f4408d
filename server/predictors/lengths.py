"""The gateway's own predictions of output lengths (`--length-predictor`): made before a request
joins the queue, from its prompt and from the answers of the last hours.

max_tokens  the token limit, whatever a client says
sent        what the client says, corrected by what its answers became
history     `queueing.predictors.history`: answers to the same prompt, to prompts that begin alike,
            of the same client
learned     `queueing.predictors.learned`: the words of the prompt, learned in the predicting
            process; until there is a model that helps, and for prompts that come again, as history
http        `length_service`: a service says it; where it does not in time, as history

A prediction that a client sends goes before one of history, learned and http, corrected as under
`sent`: a client whose answers become e^m times as long as it says, in the mean of the last ten or
so, is taken to say e^m times as much (m >= 0). Of a prompt only hashes are kept.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from kendall.policies.text import SpecError, counted
from kendall.queueing.measurement.paths import put_aside
from kendall.queueing.measurement.record import Record
from kendall.queueing.predictors.history import MOST_GROUPS, LengthHistory
from kendall.queueing.predictors.learned import LearnedLengths, Words, words_of
from kendall.queueing.predictors.learned_file import load_model, save_model
from kendall.server.engines.base import EngineRequest
from kendall.server.queue.observers import Observer
from kendall.server.runtime.length_text import MEDIAN, parse_length_predictor
from kendall.server.runtime.pools import in_a_thread
from kendall.server.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from kendall.server.predictors.length_service import LengthService

log = logging.getLogger("kendall")
ANSWERS = 5000  # that are learned from: the last ones
MOST_TOLD = 50_000  # requests under way: beyond any queue
JUDGED, FEWEST_JUDGED = 500, 10  # predictions whose quality is shown: the last ones
ENOUGH = 200  # new answers before something is learned from them
PAUSE = 10.0  # seconds between two looks whether there are
LEARNING_SHARE = 0.01  # of the time, once it has learned for the first time
# tokens, or characters of a call that is passed on, in which prompts that begin alike, or are the
# same, do not differ
BEGINNING, COMPARED = 64, 4096
INTERVAL = (0.05, 0.95)
DIGITS = 3  # of a token: exp(ln(20)) is 20.000000000000004
FAR = math.log(2)  # a prediction that is off by more is over or under
STATED_FADING = 0.9  # weight of a client's answers before the next one
COMPARED_ANSWERS, SETTLED = 50, 500  # after which a new model is compared with the one before
STANDARD_ERRORS = 3.0  # by which it is worse, or a service's ranks are the wrong way round
WORSE = math.log(1.02)  # a smaller error more is no reason to take a version back
LONGEST_SAVE = 10.0  # seconds

Ask = Callable[..., Awaitable[Any]]  # the predicting process, by the name of a function


class _Told(NamedTuple):
    """A prediction that is not yet known to be right, in ln(tokens); `interval`: where it has one;
    `rival`: what the model before would have said; `sent`, `served`: what the client or the service
    said; `flow`: the client.
    """

    log_length: float | None
    words: Words | None = None
    groups: Sequence[Hashable] = ()
    interval: tuple[float, float] | None = None
    version: int = 0
    rival: float | None = None
    sent: float | None = None
    served: float | None = None
    flow: str = ""


@dataclass(frozen=True, slots=True)
class Quality:
    """How good the predictions of the last `answers` were that no limit cut; not a number where
    that is not known.
    """

    predictor: str
    version: int
    answers: int
    rank_correlation: float
    interval_coverage: float
    bias_ratio: float
    over_fraction: float
    under_fraction: float


class LengthPredictor(Observer):
    """Predicts, and hears from the queue how long the answers became; `text` as
    `parse_length_predictor` reads it, `now` the clock of the event loop.
    """

    def __init__(self, text: str, ask: Ask, now: Callable[[], float] = lambda: 0.0) -> None:
        self.options = parse_length_predictor(text)
        self._ask = ask
        self._history = LengthHistory()
        self._stated = _StatedLengths()
        self._service: LengthService | None = None
        if self.options.name == "http":
            from kendall.server.predictors.length_service import LengthService  # noqa: PLC0415 - it needs httpx

            options = self.options
            self._service = LengthService(options.url, options.deadline, options.quantile, now)
        self._misleads = False  # the service
        self._served: deque[tuple[float, float]] = deque(maxlen=JUDGED)
        self._model: LearnedLengths | None = None
        self.version, self._versions = 0, 0  # in force; the last one
        self._before: tuple[LearnedLengths | None, int] | None = None  # while they are compared
        self._worse: list[float] = []  # error of the model in force less that of the one before
        self._unsaved = False
        self._told: dict[str, _Told] = {}  # by request; the last ones
        self._answers: deque[tuple[Words, int, bool]] = deque(maxlen=ANSWERS)
        self._new = 0
        self._failed = False
        self._judged: deque[tuple[float, float, bool | None]] = deque(maxlen=JUDGED)

    async def predicted(self, requests: Sequence[EngineRequest]) -> list[EngineRequest]:
        """The same requests, with a prediction where there is one. Waits only for a service, until
        its deadline; raises nothing.
        """
        served: Sequence[float | None] = [None] * len(requests)
        try:
            if self._service is not None:
                prompts = [prompt_of(each) for each in requests]
                served = await self._service.predictions(requests, prompts)
            return [
                self._predicted(each, told) for each, told in zip(requests, served, strict=True)
            ]
        except Exception:
            if not self._failed:
                log.exception("no length is predicted; requests are served without (said once)")
            self._failed = True
            return list(requests)

    def _predicted(self, engine_request: EngineRequest, served: float | None) -> EngineRequest:
        request, name = engine_request.request, self.options.name
        stated, limit = request.predicted_output_tokens, float(request.max_output_tokens)
        caller = engine_request.caller
        if name == "max_tokens":
            told = _Told(math.log(limit))
        elif stated is not None and (not self.options.keys or caller in self.options.keys):
            sent, under = math.log(stated), self._stated.understatement(caller)
            told = _Told(sent + under, sent=sent, flow=caller)
        elif engine_request.sampling.ignore_eos and not engine_request.sampling.stop:
            return with_prediction(engine_request, limit)  # the length; nothing is learned
        elif name == "sent":
            return with_prediction(engine_request, None)
        else:
            told = self._from_prompt(engine_request, served)
        self._told[request.id] = told
        if len(self._told) > MOST_TOLD:
            del self._told[next(iter(self._told))]
        if told.log_length is None or told.log_length == told.sent:
            return engine_request
        own = told.sent is None and told.log_length != told.served and name != "max_tokens"
        beyond = self._beyond_the_middle(told.log_length) if own else 0.0
        log_tokens = told.log_length + beyond
        tokens = limit if log_tokens >= math.log(limit) else max(1.0, math.exp(log_tokens))
        return with_prediction(engine_request, round(tokens, DIGITS))

    def _from_prompt(self, engine_request: EngineRequest, served: float | None) -> _Told:
        prompt = prompt_of(engine_request)
        caller, start = engine_request.caller, prompt[:COMPARED]
        start = start if isinstance(start, str) else tuple(start)
        whole = hash((len(prompt), start))
        # None: all answers; a call without a key has "" as its caller
        groups = None, caller, (caller, hash(start[:BEGINNING])), (caller, whole)
        if served is not None and not self._misleads:
            return _Told(math.log(served), groups=groups, served=math.log(served))
        if self.options.name != "learned":
            said = None if served is None else math.log(served)
            return _Told(self._history.log_length(groups), groups=groups, served=said)
        words = words_of(prompt)
        learned, interval, rival = None, None, None
        if self._model is not None:
            learned = self._model.log_length(words)
            low, high = self._model.log_quantiles(learned, INTERVAL).tolist()
            interval = low, high
        if self._before is not None:
            model = self._before[0]
            known = None if model is None else model.log_length(words)
            rival = self._history.log_length(groups, known)
        found = self._history.log_length(groups, learned)
        return _Told(found, words, groups, interval, self.version, rival)

    def _beyond_the_middle(self, log_length: float) -> float:
        """ln of the asked quantile over the prediction."""
        level = self.options.quantile
        if level == MEDIAN:
            return 0.0
        if self._model is not None:
            return float(self._model.log_quantiles(log_length, (level,))[0]) - log_length
        if len(self._judged) < FEWEST_JUDGED:
            return 0.0
        return float(np.quantile([made - told for told, made, _ in self._judged], level))

    def on_record(self, record: Record) -> None:
        """An answer is whole, or there is none."""
        told, tokens = self._told.pop(record.request_id, None), record.output_tokens
        if told is None or record.outcome != "completed" or not tokens:
            return
        cut, made = record.finish_reason == "length", math.log(tokens)
        if told.sent is not None and not (cut and made < told.sent):
            self._stated.add(told.flow, made - told.sent)
        if not cut:
            if told.groups:
                self._history.add(told.groups, tokens)
            limit = record.max_output_tokens
            self._judge(told, made, math.inf if limit is None else math.log(limit))
        if told.words is not None:
            self._answers.append((told.words, tokens, cut))
            self._new += 1

    def _judge(self, told: _Told, made: float, longest: float) -> None:
        """`longest`: ln of the token limit, beyond which no prediction is used."""
        if told.served is not None:
            self._served.append((told.served, made))
            self._judge_service()
        if told.log_length is None:
            return
        within = None
        if told.interval is not None:
            within = told.interval[0] <= made <= told.interval[1]
        self._judged.append((min(max(told.log_length, 0.0), longest), made, within))
        if told.rival is not None and told.version == self.version and self._before is not None:
            self._worse.append(abs(made - told.log_length) - abs(made - told.rival))
            self._compare()

    def _judge_service(self) -> None:
        """One whose short answers become the long ones is not believed until that changes."""
        count = len(self._served)
        if count < COMPARED_ANSWERS:
            return
        rank = spearman(*zip(*self._served, strict=True))
        if not self._misleads and rank < -STANDARD_ERRORS / math.sqrt(count):
            self._misleads = True
            log.warning(
                "length predictor: the answers that %s predicts to be short become long (rank "
                "correlation %.2f); history predicts until that changes",
                self.options.url,
                rank,
            )
        elif self._misleads and rank > 0:
            self._misleads = False
            log.info("length predictor: %s predicts again", self.options.url)

    def _compare(self) -> None:
        """Put the model before in force again where the newer one predicts worse."""
        assert self._before is not None
        count = len(self._worse)
        if count < COMPARED_ANSWERS or count % COMPARED_ANSWERS:
            return
        mean, error = float(np.mean(self._worse)), float(np.std(self._worse) / math.sqrt(count))
        if mean > max(WORSE, STANDARD_ERRORS * error):
            model, version = self._before
            log.warning(
                "length predictor: version %d is off by a factor %.2f more than %s, over %s; %s "
                "predicts again",
                self.version,
                math.exp(mean),
                f"version {version}" if version else "history",
                counted(count, "answer"),
                f"version {version}" if version else "history",
            )
            self._put_in_force(model, version)
        elif count >= SETTLED:
            self._before = None

    def _put_in_force(
        self,
        model: LearnedLengths | None,
        version: int,
        before: tuple[LearnedLengths | None, int] | None = None,
    ) -> None:
        self._model, self.version, self._before = model, version, before
        self._worse, self._unsaved = [], True

    async def run(self) -> None:
        """Learn again once there are enough new answers, until the gateway ends; of the time not
        more than LEARNING_SHARE, as busy clients bring enough every few seconds.
        """
        clock = asyncio.get_running_loop().time
        next_at = clock()
        while True:
            await asyncio.sleep(PAUSE)
            if clock() >= next_at and self._new >= max(ENOUGH, len(self._answers) // 5):
                self._new, began = 0, clock()
                await self.learn()
                next_at = clock() + (clock() - began) / LEARNING_SHARE
            if self._unsaved:
                self._unsaved = False
                await self._save()

    async def learn(self) -> None:
        """Put a model of the last answers in force, if it helps; else the one before stays."""
        words, tokens, cut = zip(*self._answers, strict=True)
        model: LearnedLengths | None = await self._ask(
            "learn_lengths", words, np.array(tokens, float), np.array(cut, bool)
        )
        if model is None or not model.helps:
            log.info(
                "length predictor: nothing learned from %s that predicts better than the law of "
                "all lengths",
                counted(len(words), "answer"),
            )
            return
        self._versions += 1
        self._put_in_force(model, self._versions, (self._model, self.version))
        log.info(
            "length predictor: version %d, from %s: rank correlation %.2f, loss %.3g tokens (%.3g "
            "without prompts)",
            self.version,
            counted(model.answers, "answer"),
            model.tau,
            model.loss,
            model.plain_loss,
        )

    # the file of the model

    def restore(self) -> None:
        """Put the model of the file in force, if there is one; a broken file is put aside."""
        path = self.options.path
        if path is None:
            return
        try:
            model, self._versions = load_model(path)
        except FileNotFoundError:
            return
        except (SpecError, OSError) as error:
            aside = ""
            try:
                aside = f"; renamed to {put_aside(path)}"
            except OSError as second:
                aside = f"; cannot rename it: {second.strerror or second}"
            log.warning("cannot use the length predictor %s (%s): none yet%s", path, error, aside)
            return
        self._put_in_force(model, self._versions, (None, 0))
        self._unsaved = False
        log.info(
            "length predictor: version %d, from %s", self.version, counted(model.answers, "answer")
        )

    async def _save(self) -> None:
        """The model in force, or no file where there is none any more."""
        path, model = self.options.path, self._model
        if path is None:
            return
        work = partial(path.unlink, missing_ok=True)
        if model is not None:
            work = partial(save_model, path, model, self.version)
        try:
            await in_a_thread(work, LONGEST_SAVE)
        except OSError as error:  # a TimeoutError is one
            log.warning("cannot write the length predictor %s: %s", path, error or "too slow")

    async def close(self) -> None:
        """Close the connections to a service."""
        if self._service is not None:
            await self._service.close()

    # quality, of the last predictions of answers that no limit cut

    @property
    def rank_correlation(self) -> float:
        """Spearman's, of predictions and lengths; not a number where there are few."""
        if len(self._judged) < FEWEST_JUDGED:
            return math.nan
        told, made, _ = zip(*self._judged, strict=True)
        return spearman(told, made)

    @property
    def interval_coverage(self) -> float:
        """Share of lengths within their 90 % interval; not a number where there is none."""
        known = [within for _, _, within in self._judged if within is not None]
        return sum(known) / len(known) if known else math.nan

    @property
    def bias_ratio(self) -> float:
        """Geometric mean of predicted over actual length; not a number where there is none."""
        errors = [told - made for told, made, _ in self._judged]
        return math.exp(sum(errors) / len(errors)) if errors else math.nan

    def fraction_off(self, sign: int) -> float:
        """Share of predictions above twice the length (1) or below half of it (-1); not a number
        where there is none.
        """
        off = [sign * (told - made) > FAR for told, made, _ in self._judged]
        return sum(off) / len(off) if off else math.nan

    def quality(self) -> Quality:
        """All of these."""
        return Quality(
            self.options.name,
            self.version,
            len(self._judged),
            self.rank_correlation,
            self.interval_coverage,
            self.bias_ratio,
            self.fraction_off(1),
            self.fraction_off(-1),
        )

    @property
    def service_failures(self) -> int:
        """Questions without a usable answer."""
        return 0 if self._service is None else self._service.failures


class _StatedLengths:
    """By how much the answers of each client outgrow what it says they will be."""

    def __init__(self) -> None:
        self._clients: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def add(self, client: str, log_ratio: float) -> None:
        """One more answer: ln of its length over what was said."""
        count, total = self._clients.get(client, (0.0, 0.0))
        self._clients[client] = STATED_FADING * count + 1, STATED_FADING * total + log_ratio
        self._clients.move_to_end(client)
        if len(self._clients) > MOST_GROUPS:
            self._clients.popitem(last=False)

    def understatement(self, client: str) -> float:
        """The mean, in ln, shrunk by one answer that was as said; 0 where it is negative."""
        count, total = self._clients.get(client, (0.0, 0.0))
        return max(0.0, total / (count + 1))


def spearman(told: Sequence[float], made: Sequence[float]) -> float:
    """Rank correlation; not a number where one of the two is constant."""
    ranks = np.array([_ranks(told), _ranks(made)])
    return float(np.corrcoef(ranks)[0, 1]) if np.ptp(ranks, axis=1).all() else math.nan


def _ranks(values: Sequence[float]) -> np.ndarray:
    """Equal ones share the mean of theirs."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[place])


def add_gauges(predictor: LengthPredictor, metrics: Metrics) -> None:
    """The quality of its predictions, in `/metrics`."""
    for name, help_text, read in (
        (
            "predictor_rank_correlation",
            "Spearman's rank correlation of predicted and actual output lengths",
            lambda: predictor.rank_correlation,
        ),
        (
            "predictor_interval_coverage",
            "Fraction of output lengths within their predicted 90 % interval",
            lambda: predictor.interval_coverage,
        ),
        (
            "predictor_bias_ratio",
            "Geometric mean of predicted over actual output length",
            lambda: predictor.bias_ratio,
        ),
        (
            "predictor_over_fraction",
            "Fraction of predictions above twice the output length",
            lambda: predictor.fraction_off(1),
        ),
        (
            "predictor_under_fraction",
            "Fraction of predictions below half of the output length",
            lambda: predictor.fraction_off(-1),
        ),
        (
            "predictor_service_failures",
            "Questions to the length prediction service without a usable answer",
            lambda: predictor.service_failures,
        ),
        (
            "predictor_version",
            "Version of the learned length predictor in force; 0: none",
            lambda: predictor.version,
        ),
    ):
        metrics.gauge_of(name, help_text, read)


def with_prediction(engine_request: EngineRequest, tokens: float | None) -> EngineRequest:
    """The same request with this prediction."""
    if tokens is engine_request.request.predicted_output_tokens:
        return engine_request
    request = engine_request.request._replace(predicted_output_tokens=tokens)
    return replace(engine_request, request=request)


def prompt_of(engine_request: EngineRequest) -> str | Sequence[int]:
    """The tokens, or of a call that is passed on the text as far as it is kept."""
    call = engine_request.call
    if call is None:
        return engine_request.prompt_token_ids
    return call.prompt_start.decode(errors="replace")
