"""The autopilot's hands: what it may turn, putting its decisions in force, and telling of each.

It decides in the predicting process with every assessment (`queueing.choosing.autopilot`); here its
decisions are logged, kept and carried out.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from kendall.policies import parse_policy
from kendall.policies.parameters import parameters_of, size_field
from kendall.queueing.choosing.autopilot.bounds import AutopilotBounds
from kendall.queueing.choosing.forecast import Setting
from kendall.server.admission.limits_in_force import PolicyChange
from kendall.server.calibration.host import LiveHost
from kendall.server.live.answers import Decided
from kendall.server.runtime.errors import ApiError
from kendall.server.settings import AutopilotMode

if TYPE_CHECKING:
    from kendall.server.live.prediction_client import Ask, PredictorClient

log = logging.getLogger("kendall.autopilot")
KEPT = 100  # decisions
NOTHING = msgspec.Raw(b"null")


def autopilot_bounds(
    policy: str, allowed: Sequence[str], max_clipped_fraction: float
) -> AutopilotBounds:
    """By the flags; without a list, the kind of policy stays and its batch size is free (of
    dynamic: capped; not of one that needs other parameters too). Raises SpecError.
    """
    in_force = parse_policy(policy)
    size = size_field(type(in_force))
    parameters = parameters_of(type(in_force)).values()
    if any(each.required and each.name != size for each in parameters):
        own: tuple[str, ...] = (policy,)
    else:
        own = ("dynamic", "capped") if in_force.name == "dynamic" else (in_force.name,)
    return AutopilotBounds(
        policies=tuple(allowed) or own, max_clipped_fraction=max_clipped_fraction
    )


class SavedPilot(msgspec.Struct, frozen=True, kw_only=True):
    """Of the state file: its memory, on the clock that showed `clock`, the setting in force, and
    the policy that an operator had put in force.
    """

    autopilot: msgspec.Raw = NOTHING
    clock: float = 0.0
    knobs: Setting | None = None
    followed: str | None = None


@dataclass(frozen=True, slots=True)
class BoundsSummary:
    """What it may do."""

    policies: tuple[str, ...]
    max_clipped_fraction: float


@dataclass(frozen=True, slots=True)
class PilotSummary:
    """As `/admin/state` shows it."""

    mode: AutopilotMode
    bounds: BoundsSummary
    decisions: tuple[Decided, ...]


class Pilot:
    """The gateway's side of the autopilot."""

    def __init__(self, gateway: LiveHost, predictor: PredictorClient) -> None:
        settings = gateway.settings
        self._gateway = gateway
        self._predictor = predictor
        self._mode: AutopilotMode = settings.autopilot
        self.follow(settings.policy)
        self._shift = 0.0
        self._decisions: deque[Decided] = deque(maxlen=KEPT)
        self.state: msgspec.Raw | None = None  # what it remembers, as it would be saved

    def follow(self, policy: str) -> None:
        """An operator put `policy` in force: without a list of policies, its kind is the one
        that stays.
        """
        settings = self._gateway.settings
        self.bounds = autopilot_bounds(
            policy, settings.autopilot_policies, settings.max_clipped_fraction
        )
        self._followed = policy

    @property
    def on(self) -> bool:
        """Whether it decides, carried out or not."""
        return self._mode != "off"

    async def start(self, ask: Ask) -> None:
        """Let it decide from here on, with what it remembers."""
        if self.on:
            await ask("start_pilot", self._mode, self.state, self._shift)

    def remember(self, state: msgspec.Raw | None) -> None:
        """What it would be saved as, on the clock of this life."""
        self.state, self._shift = state, 0.0

    async def steer(self, mode: AutopilotMode) -> PilotSummary:
        """Another mode, at once where it is to do less; what it remembers stays. A decision
        under way is not carried out. Raises ApiError where there are no assessments to decide by.
        """
        if self._gateway.settings.prediction_interval <= 0:
            raise ApiError(
                409,
                "no_prediction",
                "got --prediction-interval 0; expected an interval > 0, because the autopilot "
                "needs the live prediction",
            )
        log.info("autopilot: %s, was %s", mode, self._mode)
        self._mode = mode
        await self._predictor.ask("steer_pilot", mode)
        return self.shown()

    def carry_out(self, decision: Decided) -> None:
        """Log it, keep it, and change the setting if it says so."""
        log.info("%s", decision.says)
        self._decisions.append(decision)
        self._gateway.metrics.verdicts.decisions.labels(decision.kind).inc()
        if decision.acts and self._mode == "act":
            self._turn(decision.after)

    def restore(self, saved: SavedPilot) -> None:
        """Its memory, and the setting that it had put in force, from a state file. Raises SpecError
        for a policy that cannot be used here, and takes up nothing then.
        """
        memory = msgspec.json.decode(saved.autopilot)
        if self._mode == "off" or memory is None:
            return
        acts = self._mode == "act"
        followed = saved.followed or self._followed
        knobs = saved.knobs or Setting(policy=followed)
        own = (followed, knobs.policy) if acts else ()
        for policy in dict.fromkeys((*own, *_policies_in(memory))):
            parse_policy(policy)
        self.state = saved.autopilot
        self._shift = self._gateway.now() - saved.clock
        if acts:
            self.follow(followed)
            self._turn(knobs)

    def saved(self) -> SavedPilot:
        """For the state file."""
        batcher = self._gateway.batcher
        return SavedPilot(
            autopilot=NOTHING if self.state is None else self.state,
            clock=self._gateway.now(),
            knobs=Setting(
                policy=batcher.policy_text,
                max_output_tokens=self._gateway.limits.max_output_tokens,
                servers=batcher.capabilities.servers,
            ),
            followed=self._followed,
        )

    def shown(self) -> PilotSummary:
        """For `/admin/state`."""
        bounds = BoundsSummary(self.bounds.policies, self.bounds.max_clipped_fraction)
        return PilotSummary(self._mode, bounds, tuple(self._decisions))

    def _turn(self, setting: Setting) -> None:
        self._gateway.limits.change(
            PolicyChange(policy=setting.policy, max_output_tokens=setting.max_output_tokens),
            by_autopilot=True,
        )


def _policies_in(memory: object) -> Iterator[str]:
    """Those of the settings in its memory: tried, held back, or on trial."""
    if isinstance(memory, dict):
        if isinstance(policy := memory.get("policy"), str):
            yield policy
        memory = list(memory.values())
    for value in memory if isinstance(memory, list) else ():
        yield from _policies_in(value)
