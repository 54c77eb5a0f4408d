"""The gateway's own predictions of output lengths (`--length-predictor`): made before a request
joins the queue, from its prompt and from the answers of the last hours.

history   `queueing.predictors.history`: answers to the same prompt, to prompts that begin alike, of
          the same client
learned   `queueing.predictors.learned`: the words of the prompt, learned in the predicting process;
          until there is a model that helps, and for prompts that come again, as history

A prediction that a client sends is left as it is. Of a prompt only hashes are kept, and nothing is
written to disk.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from kendall.policies.text import counted
from kendall.queueing.measurement.record import Record
from kendall.queueing.predictors.history import LengthHistory
from kendall.queueing.predictors.learned import LearnedLengths, Words, words_of
from kendall.server.engines.base import EngineRequest
from kendall.server.queue.observers import Observer
from kendall.server.settings import LengthPrediction
from kendall.server.telemetry.metrics import Metrics

log = logging.getLogger("kendall")
ANSWERS = 5000  # that are learned from: the last ones
MOST_TOLD = 50_000  # requests under way: beyond any queue
JUDGED, FEWEST_JUDGED = 500, 10  # predictions whose quality is shown: the last ones
ENOUGH = 200  # new answers before something is learned from them
PAUSE = 10.0  # seconds between two looks whether there are
# tokens, or characters of a call that is passed on, in which prompts that begin alike, or are the
# same, do not differ
BEGINNING, COMPARED = 64, 4096
INTERVAL = (0.05, 0.95)

Ask = Callable[..., Awaitable[Any]]  # the predicting process, by the name of a function


class _Told(NamedTuple):
    """A prediction that is not yet known to be right; `interval`: ln(tokens), where it has one."""

    words: Words | None
    groups: Sequence[Hashable]
    log_length: float | None
    interval: tuple[float, float] | None


class LengthPredictor(Observer):
    """Predicts, and hears from the queue how long the answers became."""

    def __init__(self, kind: LengthPrediction, ask: Ask) -> None:
        self.kind = kind
        self._ask = ask
        self._history = LengthHistory()
        self._model: LearnedLengths | None = None
        self._errors = -math.inf, math.inf  # of ln(tokens), at INTERVAL
        self.version = 0  # of the model in force
        self._told: dict[str, _Told] = {}  # by request; the last ones
        self._answers: deque[tuple[Words, int, bool]] = deque(maxlen=ANSWERS)
        self._new = 0
        self._failed = False
        self._judged: deque[tuple[float, float, bool | None]] = deque(maxlen=JUDGED)

    def predict(self, requests: Sequence[EngineRequest]) -> list[EngineRequest]:
        """The same requests, with a prediction where they had none and there is one."""
        try:
            return [
                each if each.request.predicted_output_tokens is not None else self._predicted(each)
                for each in requests
            ]
        except Exception:
            if not self._failed:
                log.exception("no length is predicted; requests are served without (said once)")
            self._failed = True
            return list(requests)

    def _predicted(self, engine_request: EngineRequest) -> EngineRequest:
        request = engine_request.request
        # the length is known, and nothing is learned
        if engine_request.sampling.ignore_eos and not engine_request.sampling.stop:
            return with_prediction(engine_request, float(request.max_output_tokens))
        prompt = prompt_of(engine_request)
        caller, start = engine_request.caller, tuple(prompt[:COMPARED])
        whole = hash((len(prompt), start))
        groups = "", caller, (caller, hash(start[:BEGINNING])), (caller, whole)
        words, learned, interval = None, None, None
        if self.kind == "learned":
            words = words_of(prompt)
            if self._model is not None:
                learned = self._model.log_length(words)
                low, high = self._errors
                interval = learned + low, learned + high
        found = self._history.log_length(groups, learned)
        self._told[request.id] = _Told(words, groups, found, interval)
        if len(self._told) > MOST_TOLD:
            del self._told[next(iter(self._told))]
        if found is None:
            return engine_request
        tokens = min(max(1.0, math.exp(found)), float(request.max_output_tokens))
        return with_prediction(engine_request, tokens)

    def on_record(self, record: Record) -> None:
        """An answer is whole, or there is none."""
        told, tokens = self._told.pop(record.request_id, None), record.output_tokens
        if told is None or record.outcome != "completed" or not tokens:
            return
        cut = record.finish_reason == "length"
        if not cut:
            self._history.add(told.groups, tokens)
            self._judge(told, math.log(tokens))
        if told.words is not None:
            self._answers.append((told.words, tokens, cut))
            self._new += 1

    def _judge(self, told: _Told, log_tokens: float) -> None:
        if told.log_length is None:
            return
        within = None
        if told.interval is not None:
            within = told.interval[0] <= log_tokens <= told.interval[1]
        self._judged.append((told.log_length, log_tokens, within))

    async def run(self) -> None:
        """Learn again once there are enough new answers, until the gateway ends."""
        while True:
            await asyncio.sleep(PAUSE)
            if self._new >= max(ENOUGH, len(self._answers) // 5):
                self._new = 0
                await self.learn()

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
        self._model, self.version = model, self.version + 1
        low, high = model.errors_at(INTERVAL).tolist()
        self._errors = low, high
        log.info(
            "length predictor: version %d, from %s: rank correlation %.2f, loss %.3g tokens (%.3g "
            "without prompts)",
            self.version,
            counted(model.answers, "answer"),
            model.tau,
            model.loss,
            model.plain_loss,
        )

    # quality, of the last predictions of answers that no limit cut

    @property
    def rank_correlation(self) -> float:
        """Spearman's, of predictions and lengths; not a number where there are few."""
        if len(self._judged) < FEWEST_JUDGED:
            return math.nan
        told, made, _ = zip(*self._judged, strict=True)
        ranks = np.array([_ranks(told), _ranks(made)])
        return float(np.corrcoef(ranks)[0, 1]) if np.ptp(ranks, axis=1).all() else math.nan

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
            "predictor_version",
            "Version of the learned length predictor in force; 0: none",
            lambda: predictor.version,
        ),
    ):
        metrics.gauge_of(name, help_text, read)


def with_prediction(engine_request: EngineRequest, tokens: float) -> EngineRequest:
    """The same request with this prediction."""
    request = engine_request.request._replace(predicted_output_tokens=tokens)
    return replace(engine_request, request=request)


def prompt_of(engine_request: EngineRequest) -> str | Sequence[int]:
    """The tokens, or of a call that is passed on the text as far as it is kept."""
    call = engine_request.call
    if call is None:
        return engine_request.prompt_token_ids
    return call.prompt_start.decode(errors="replace")
