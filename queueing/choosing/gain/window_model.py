"""The queue model of a window's estimates, for any setting: the same rate, lengths, speed and
residual for all.

No delay that is printed is shorter than the gateway's own way from an arrival to a dispatch
(`Estimates.gateway_turnaround`). A window says how fast the engine runs, not how: the speed and the
stalls that one policy's batches showed are taken for every policy's. Steps of a continuous engine
show no residual, so from there other policies get the calibrated one; nor do they get its stalls:
its speed holds most of them already (measured: with both, means of whole batches came out 40 % too
long, without 10 %).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from kendall.policies import parse_policy, served_as
from kendall.policies.text import counted
from kendall.queueing.choosing.answer import precise, searched
from kendall.queueing.choosing.forecast import Setting
from kendall.queueing.choosing.gain.known_lengths import FEWEST, KnownLengths, known_lengths
from kendall.queueing.choosing.objective import Slo
from kendall.queueing.choosing.search import Predict
from kendall.queueing.distributions.token_distribution import TokenDistribution
from kendall.queueing.estimation.checked import at_their_speeds
from kendall.queueing.estimation.estimates import Estimates
from kendall.queueing.estimation.stall_backlog import behind_stalls, stall_backlog, utilisation_of
from kendall.queueing.estimation.window_queue import QueueLimits, known_memory, model_of
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.prediction import predict_model
from kendall.queueing.queue import Queue
from kendall.queueing.result import Prediction


@dataclass(frozen=True, eq=False, kw_only=True)
class WindowModel:
    """`shape` is the calibrated law, `limits` what engine and clients bound; `family` names the law
    of lengths beyond the known ones, `factors` the speed of servers over that of all, by their ids.
    """

    estimates: Estimates
    shape: LatencyModel
    limits: QueueLimits
    family: str | None = None
    factors: Mapping[int, float] = field(default_factory=dict)

    @cached_property
    def law(self) -> LatencyModel:
        """The shape at the window's speed, residual and stalls."""
        law = self.estimates.law(self.shape)
        return (
            dataclasses.replace(law, cv=self.shape.cv)
            if parse_policy(self.estimates.policy).joins_running
            else law
        )

    @cached_property
    def lengths(self) -> KnownLengths | None:
        """None where there are too few."""
        return known_lengths(self.estimates.output_tokens, self.family)

    @property
    def rate(self) -> float:
        """Arrivals per second."""
        return self.estimates.arrival_rate.value

    @property
    def effective_n(self) -> float:
        """Observations that tell as much as the estimates do."""
        return min(self.estimates.arrival_rate.effective_n, self.estimates.speed.effective_n)

    def refusal(self, limit: int | None) -> str | None:
        """Why no setting with that token limit can be forecast; None where it can."""
        if self.lengths is None:
            known = self.estimates.output_tokens.counts.size
            return (
                f"nothing is known of the lengths yet: got {counted(known, 'answer')}, "
                f"expected at least {FEWEST}"
            )
        if not self.rate > 0:
            return "nothing arrived in the window: there is no rate to forecast at"
        return self.lengths.refusal(limit)

    def model(
        self,
        setting: Setting,
        whole: TokenDistribution | None = None,
        law: LatencyModel | None = None,
    ) -> Queue:
        """The queue of a setting; `whole` and `law` in place of the estimated ones. Where
        `refusal` has nothing to say.
        """
        if whole is None:
            assert self.lengths is not None
            whole = self.lengths.whole
        found = model_of(
            served_as(parse_policy(setting.policy), pads=self.limits.pads),
            whole if setting.max_output_tokens is None else whole.clip(setting.max_output_tokens),
            self.law if law is None else law,
            self._limits(setting),
            self.estimates,
        )
        return at_their_speeds(found, self.factors)

    def load(self, setting: Setting) -> float:
        """The setting's load at the window's rate."""
        return self.model(setting).load(self.rate)

    def _limits(self, setting: Setting) -> QueueLimits:
        limit = setting.max_output_tokens
        return dataclasses.replace(self.limits, servers=setting.servers, max_output_tokens=limit)

    def cut_by_memory(self, setting: Setting) -> bool:
        """Whether a batch may need more KV memory than there is: no model has it cut then. Where
        `refusal` has nothing to say.
        """
        known, model = known_memory(self._limits(setting), self.estimates), self.model(setting)
        if known is None or model.policy.joins_running:
            return False
        memory, held = known
        largest = self.estimates.prompt_tokens.law().longest + held
        return model.bound is None or model.bound * largest > memory

    def predicted(self, setting: Setting, predict: Predict | None = None) -> Prediction:
        """The setting's steady state as the gateway would measure it. Raises UnstableQueueError."""
        if predict is not None:
            return self.measured(predict)(self.model(setting), self.rate)
        if setting not in self._predictions:
            self._predictions[setting] = self.measured(precise)(self.model(setting), self.rate)
        return self._predictions[setting]

    def in_full(self, setting: Setting) -> Prediction:
        """The same as `kendall predict` says it, quantiles and all, and kept as the setting's."""
        self._predictions[setting] = self.predicted(setting, predict_model)
        return self._predictions[setting]

    def backlog(self, model: Queue, arrival_rate: float) -> float:
        """Seconds that stalls add to the mean sojourn beyond what law and speed hold: of a
        continuous engine.
        """
        stalls = self.estimates.stalls
        if not stalls.count or not model.policy.joins_running:
            return 0.0
        busy = (
            None
            if parse_policy(self.estimates.policy).joins_running
            else utilisation_of(model, arrival_rate)
        )
        return stall_backlog(stalls, model, model.load(arrival_rate), utilisation=busy)

    def measured(self, predict: Predict, *, stalling: bool = True) -> Predict:
        """What the gateway would measure of a model: with its own turnaround, and behind the
        stalls.

        Whatever ranks or reports settings by their predictions asks this. `stalling`: with the
        backlog.
        """

        def found(model: Queue, arrival_rate: float) -> Prediction:
            bare = predict(model, arrival_rate).with_turnaround(self.estimates.gateway_turnaround)
            return behind_stalls(bare, self.backlog(model, arrival_rate)) if stalling else bare

        return found

    def ranking(self, slos: Sequence[Slo] = ()) -> Predict:
        """What puts dozens of settings in order: cheaper than what is reported of the best one."""
        return self.measured(lambda model, arrival_rate: searched(model, arrival_rate, slos))

    @cached_property
    def _predictions(self) -> dict[Setting, Prediction]:
        return {}
