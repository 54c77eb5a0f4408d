"""The plan of a sweep, as data, and how two plans differ.

A plan holds everything that the measurement depends on and nothing else (no ports, no folders): it
is saved with the results, and a folder can only be gone on with under the very same plan.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from kendall.loadgen.sending.options import check_base_url
from kendall.loadgen.sweep.slo import SATURATION, parse_slo
from kendall.policies import Policy, format_policy, parse_policy
from kendall.policies.orders import FIRST_COME
from kendall.policies.text import SpecError, counted, order_text, with_order
from kendall.queueing.arrivals.length_prediction import parse_length_prediction
from kendall.queueing.distributions.token_distribution import SHORTER, parse_distribution
from kendall.queueing.measurement.batch_means import TOO_WIDE
from kendall.queueing.measurement.paths import writing
from kendall.queueing.predictors.predictor_text import NO_PREDICTION, without_predictor

POLICIES = (
    "single",
    "dynamic",
    "fixed:batch_size=4",
    "capped:max_batch_size=8",
    "elastic:max_batch_size=8",
    "continuous:max_batch_size=4",
)
LOADS = (0.3, 0.5, 0.7, 0.8)
POSITIVE = (
    "num_prompts",
    "duration",
    "precision",
    "cell_limit",
    "tolerance",
    "max_num_seqs",
    "processes",
)


class SweepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The measurement. Loads are fractions of each policy's largest stable rate; rates are per
    second.
    """

    policies: tuple[str, ...] = POLICIES
    orders: tuple[str, ...] = ()  # under which each policy is measured; none: its own
    loads: tuple[float, ...] = ()
    request_rates: tuple[float, ...] = ()
    max_output_tokens: tuple[int | None, ...] = (None,)  # the gateway's limit
    output_tokens: str = "uniform:low=8,high=24"
    prompt_tokens: str = "deterministic:value=32"
    predictor: str = "none"  # of the output lengths that are sent along
    seed: int = 1
    num_prompts: int | None = None  # of every cell; else `duration`, else `precision`
    duration: float | None = None  # seconds
    precision: float = 0.1  # half width of the mean delay over the mean
    cell_limit: float = 60.0  # seconds of sending
    processes: int = 1  # senders
    order: Literal["listed", "random"] = "listed"
    allow_unstable: bool = False
    find_saturation: bool = False
    slo: tuple[str, ...] = ()
    tolerance: float = 0.05  # of a saturation search: high / low - 1
    # seconds of a calibration of the speed before and after each cell; 0: none
    bracket: float = 2.0
    # times that a cell is measured again where the speed changed around it by too much
    repeat_noisy: int = 1
    model: str = "tiny"
    engine: str = "auto"
    base_url: str | None = None  # a gateway that runs already
    plain_server: bool = False  # no gateway: another server with OpenAI's API
    latency: str | None = None  # a law to take instead of calibrating one
    max_num_seqs: int = 16

    def __post_init__(self) -> None:
        policies = [parse_policy(text) for text in self.policies]
        canonical = {
            "policies": tuple(map(format_policy, policies)),
            "orders": tuple(
                order_text(_ordered(policy, order))
                for policy in policies[:1]
                for order in self.orders
            ),
            "predictor": str(parse_length_prediction(self.predictor)),
        }
        for name, value in canonical.items():
            msgspec.structs.force_setattr(self, name, value)
        self._check()
        self._check_numbers()
        for text in self.slo:
            parse_slo(text)
        parse_distribution(self.output_tokens, remedy=SHORTER)
        parse_distribution(self.prompt_tokens, remedy=SHORTER)

    @property
    def ordered_policies(self) -> tuple[str, ...]:
        """Each policy under each order. Raises SpecError: a policy that cannot serve one."""
        if not self.orders:
            return self.policies
        policies = [parse_policy(policy) for policy in self.policies]
        return tuple(
            format_policy(_ordered(policy, order)) for policy in policies for order in self.orders
        )

    @property
    def has_orders(self) -> bool:
        """Whether a policy is measured in another order than that of arrival."""
        policies = map(parse_policy, self.ordered_policies)
        return any(order_text(policy) != FIRST_COME.name for policy in policies)

    @property
    def reads_no_prediction(self) -> str | None:
        """A warning where an order goes by predicted lengths and none are sent."""
        if self.predictor != str(NO_PREDICTION):
            return None
        return without_predictor(map(parse_policy, self.ordered_policies))

    @property
    def searches(self) -> list[tuple[str, int | None, str]]:
        """Policy, limit and goal of each: saturation, or the text of an SLO."""
        goals = ([SATURATION] if self.find_saturation else []) + list(self.slo)
        return [
            (policy, limit, goal)
            for limit in self.max_output_tokens
            for policy in self.ordered_policies
            for goal in goals
        ]

    @property
    def searches_in_words(self) -> str:
        """How many searches there are, and for what."""
        searches = self.searches
        goals = Counter(goal for _, _, goal in searches)
        given = {goal: f"{goal} (--slo)" for goal in self.slo} | {
            SATURATION: f"{SATURATION} (--find-saturation)"
        }
        parts = [f"{number} for {given[goal]}" for goal, number in goals.items()]
        return f"{counted(len(searches), 'search', 'searches')}: {', '.join(parts)}"

    def differences(self, other: SweepPlan) -> list[str]:
        """The fields that differ from those of another plan, one line each."""
        before, after = msgspec.to_builtins(self), msgspec.to_builtins(other)
        return [
            f"{key}: {_shown(before[key])} there, {_shown(after[key])} here"
            for key in before
            if before[key] != after[key]
        ]

    def _check(self) -> None:
        if self.base_url is not None:
            check_base_url(self.base_url)
        policies = self.ordered_policies
        if len(set(self.orders)) < len(self.orders):
            raise SpecError(f"got the orders {', '.join(self.orders)}; expected each once")
        if not policies or len(set(policies)) < len(policies):
            raise SpecError(
                f"got the policies {', '.join(policies) or 'none'}; expected at least one, each "
                "once"
            )
        if not (self.loads or self.request_rates or self.searches):
            raise SpecError(
                "got nothing to measure; expected --loads, --request-rates, --find-saturation or "
                "--slo"
            )
        if self.loads and max(self.loads) >= 1 and not self.allow_unstable:
            raise SpecError(
                f"got load {max(self.loads):g}; expected loads below 1, or --allow-unstable to "
                "see the queue grow"
            )

    def _check_numbers(self) -> None:
        for name, values in (("loads", self.loads), ("request-rates", self.request_rates)):
            if any(not 0 < value < math.inf for value in values) or len(set(values)) < len(values):
                raise SpecError(f"got --{name} {_shown(values)}; expected different numbers > 0")
        for name in POSITIVE:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise SpecError(f"got --{name.replace('_', '-')} {value}; expected a number > 0")
        if self.precision > TOO_WIDE:
            raise SpecError(
                f"got --precision {self.precision}; expected at most {TOO_WIDE}, beyond which a "
                "run counts as too short"
            )
        for name, unit in (("bracket", "seconds"), ("repeat_noisy", "a number")):
            if getattr(self, name) < 0:
                raise SpecError(
                    f"got --{name.replace('_', '-')} {getattr(self, name)}; expected {unit} >= 0"
                )


def _ordered(policy: Policy, order: str) -> Policy:
    try:
        return with_order(policy, order)
    except SpecError as error:
        raise SpecError(f"{error} (each policy is measured under each order)") from None


def save_plan(path: Path, plan: SweepPlan) -> None:
    """Write it; the folder is made. Raises CommandError."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(plan), indent=1) + b"\n")


def load_plan(path: Path) -> SweepPlan:
    """Read a plan from its file. Raises SpecError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=SweepPlan)
    except (OSError, msgspec.MsgspecError) as error:
        raise SpecError(
            f"got {path.parent}; expected the folder of a sweep, with a plan.json ({error})"
        ) from None


def _shown(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(_shown, value)) or "none"
    return "none" if value is None else str(value)
