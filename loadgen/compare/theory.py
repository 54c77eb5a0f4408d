"""The theory beside an observation: the simulator on the run's own arrivals, predictions, the
published formula, the sampling error.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from kendall.loadgen.compare.comparison import (
    QUANTITIES,
    Compared,
    PaperKind,
    Predicted,
    SamplingError,
    Theory,
)
from kendall.loadgen.compare.epoch_sample import predictor_of
from kendall.loadgen.compare.sampling_error import sampling_error
from kendall.policies import Continuous, Dynamic, Fixed, Policy, Single, SpecError
from kendall.queueing.arrivals.notation import gap_scv
from kendall.queueing.arrivals.text import Process
from kendall.queueing.description.parts import Engine, Requests
from kendall.queueing.distributions.token_distribution import TokenDistribution
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.errors import PredictionError, UnstableQueueError
from kendall.queueing.estimation.checked import CheckedRun, check_run, cut_at, requests_of, trace_of
from kendall.queueing.estimation.replayed import replayed
from kendall.queueing.estimation.window.of_run import window_of_run
from kendall.queueing.estimation.window.snapshot import Snapshot
from kendall.queueing.estimation.window_queue import heeded_batch_tokens
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.measurement.recursion import Served, prompts_cut
from kendall.queueing.prediction import predict_model
from kendall.queueing.prediction.by_length import ByLength, durations_by_length
from kendall.queueing.predictors.predictor_text import PredictorText
from kendall.queueing.queue import Queue
from kendall.queueing.result import LEVELS

ONE_TOKEN = TokenDistribution(np.array([0.0, 1.0]))  # a replay draws no lengths


def theory_of(
    law: LatencyModel,
    output_tokens: TokenDistribution | None = None,
    asked_rate: float | None = None,
    bounds: EngineBounds | None = None,
    predictor: PredictorText | None = None,
    *,
    process: Process | None = None,
) -> Theory:
    """Everything a law can say about a run. Lengths, rate and predictor default to the run's
    own. Predictions are those of Poisson arrivals; `process`: what was asked for instead.
    """
    asked = AskedQueue(law, output_tokens, asked_rate, bounds or EngineBounds(), predictor, process)
    return Theory(
        law=law,
        replay=asked.replay,
        check=asked.check,
        predict=asked.predict,
        live=asked.live,
        published=asked.published,
        sampling_error=asked.sampling_error,
        asked_rate=asked_rate,
        model=asked.calibrated,
        by_length=asked.by_length,
        predictor=predictor,
    )


@dataclass(frozen=True, slots=True)
class AskedQueue:
    """The queue that a run was asked to be."""

    law: LatencyModel
    output_tokens: TokenDistribution | None
    rate: float | None
    bounds: EngineBounds
    predictor: PredictorText | None
    process: Process | None = None

    def replay(
        self, policy: Policy, requests: Sequence[Served], at: LatencyModel
    ) -> dict[str, tuple[float, float]]:
        return replay_arrivals(policy, requests, at, self.bounds)

    def check(
        self, policy: Policy, requests: Sequence[Served], window: Snapshot
    ) -> CheckedRun | None:
        model = cut_at(self.calibrated(policy, requests), self.bounds.batch_tokens)
        return check_run(window, model, flows_of(requests))

    def predict(
        self, policy: Policy, rate: float, requests: Sequence[Served], at: LatencyModel
    ) -> Predicted:
        return predict_means(self._model(policy, requests, at), self.rate or rate)

    def live(
        self, policy: Policy, rate: float, requests: Sequence[Served], at: LatencyModel
    ) -> Predicted:
        model = self._model(policy, requests, at)
        lengths, predictor = lengths_of(requests), predictor_of(requests)
        own = model.but(output_tokens=lengths, predictor=predictor)
        return predict_means(own, rate)

    def by_length(
        self, policy: Policy, rate: float, requests: Sequence[Served], at: LatencyModel
    ) -> ByLength | None:
        try:
            return durations_by_length(self._model(policy, requests, at), self.rate or rate)
        except PredictionError:
            return None

    def published(
        self, policy: Policy, rate: float, requests: Sequence[Served], at: LatencyModel
    ) -> tuple[float, PaperKind] | None:
        return published_delay(self._model(policy, requests, at), self.rate or rate)

    def sampling_error(
        self,
        policy: Policy,
        rate: float,
        requests: Sequence[Served],
        compared: Compared,
        answer: Predicted,
    ) -> SamplingError | None:
        model = self.calibrated(policy, requests)
        if self.process is not None:
            scv = gap_scv(self.process)
            model = model.but(process=self.process, scv=scv)
        return sampling_error(model, self.rate or rate, len(requests), compared, answer)

    def calibrated(self, policy: Policy, requests: Sequence[Served]) -> Queue:
        return self._model(policy, requests, self.law)

    def _model(self, policy: Policy, requests: Sequence[Served], at: LatencyModel) -> Queue:
        bounds, cut = self.bounds.for_slots(policy), None
        if bounds.batch_tokens is not None:
            batches = np.array([request.batch_id for request in requests])
            prompts = np.array([request.prompt_tokens for request in requests])
            share = prompts_cut(batches, prompts, bounds.batch_tokens)
            cut = heeded_batch_tokens(bounds.batch_tokens, share)
        bounds = msgspec.structs.replace(bounds, batch_tokens=cut)
        counts = at.kp or bounds.of_a_step(policy) is not None
        return Queue(
            policy=policy,
            requests=Requests(
                output_tokens=self.output_tokens or lengths_of(requests),
                prompt_tokens=prompts_of(requests) if counts else None,
                predictor=self.predictor or predictor_of(requests),
            ),
            engine=Engine(law=at, servers=servers_of(requests), bounds=bounds),
        )


def lengths_of(requests: Sequence[Served]) -> TokenDistribution:
    """The run's own output lengths."""
    return TokenDistribution.from_counts([r.output_tokens for r in requests if r.output_tokens])


def prompts_of(requests: Sequence[Served]) -> TokenDistribution:
    """The run's own prompt lengths."""
    return TokenDistribution.from_counts([max(1, r.prompt_tokens) for r in requests])


def servers_of(requests: Sequence[Served]) -> int:
    """The number of servers that the run shows."""
    return 1 + max(request.server_id for request in requests)


def replay_arrivals(
    policy: Policy,
    requests: Sequence[Served],
    law: LatencyModel,
    bounds: EngineBounds | None = None,
    *,
    seed: int = 0,
) -> dict[str, tuple[float, float]]:
    """Start and release of every request had the law served it: means over draws of the residuals,
    by id.

    Who was cut short in the run is replayed with the tokens that it got. The queue begins empty.
    The same seed draws the same residuals for every law with the same cv.
    """
    bounds = (bounds or EngineBounds()).for_slots(policy)
    model = Queue(
        policy=policy,
        requests=Requests(output_tokens=ONE_TOKEN),
        engine=Engine(law=law, servers=servers_of(requests), bounds=bounds),
    )
    entering, flows = requests_of(window_of_run(requests), model), flows_of(requests)
    replay = replayed(model, trace_of(entering, flows), seed=seed)
    starts, releases = (
        replay.dispatched.mean(axis=0).tolist(),
        replay.released.mean(axis=0).tolist(),
    )
    ids = [requests[row].id for row in entering.row.tolist()]
    return dict(zip(ids, zip(starts, releases, strict=True), strict=True))


def flows_of(requests: Sequence[Served]) -> npt.NDArray[np.str_]:
    """The flow of each request, in their order."""
    return np.array([request.flow or "" for request in requests], dtype=np.str_)


def predict_means(model: Queue, rate: float, method: str = "auto") -> Predicted:
    """Means and quantiles of a prediction; None where there is no steady state or no method for
    it.
    """
    nothing = Predicted(load=None, queueing_delay=None, sojourn_time=None)
    if not 0 < rate < math.inf:
        return nothing
    try:
        answer = predict_model(model, rate, method)
    except UnstableQueueError as error:
        return dataclasses.replace(nothing, load=error.load)
    except PredictionError:
        return nothing
    return Predicted(
        load=answer.load,
        queueing_delay=answer.queueing_delay.mean,
        sojourn_time=answer.sojourn_time.mean,
        method=answer.method,
        utilisation=answer.utilisation,
        batch_size=answer.batch_size.mean,
        quantiles={
            name: {
                level: value
                for level in LEVELS
                if (value := getattr(getattr(answer, name), level)) is not None
                and math.isfinite(value)
            }
            for name in QUANTITIES
        },
    )


def published_delay(model: Queue, rate: float) -> tuple[float, PaperKind] | None:
    """The mean queueing delay by the papers' formula, seconds; None where they have none for this
    queue.

    The prompts enter k1 by their mean, as the formulas know none. Those of dynamic and elastic know
    no bound of the batch either and are evaluated without the engine's; a bound of the mean is only
    the one for padded batches without a residual.
    """
    policy, law = model.policy, model.engine.law
    if model.engine.servers > 1 or isinstance(policy, Continuous) or not 0 < rate < math.inf:
        return None
    if not isinstance(policy, Fixed):
        model = model.but(max_num_seqs=None)
    if not isinstance(policy, Single):
        mean_prompt = model.requests.prompt_tokens.mean if model.requests.prompt_tokens else 0.0
        mean_law = dataclasses.replace(law, k1=law.k1 + law.kp * mean_prompt, kp=0.0)
        model = model.but(law=mean_law, prompt_tokens=None)
    try:
        mean = predict_model(model, rate, method="paper").queueing_delay.mean
    except (PredictionError, SpecError):
        return None  # unstable; or nothing is published: capped batches, max_wait
    kind: PaperKind = (
        "exact"
        if isinstance(policy, Single)
        else "bound"
        if isinstance(policy, Dynamic) and not law.cv
        else "printed"
    )
    return None if mean is None else (mean, kind)
