"""How many files it takes to add one of each thing: in a scratch copy of the product each is added,
and what a user sees of it is asked for. The numbers are those of docs/architecture.md.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.scratch_product import run_in, scratch_product

LAW = "k1=0.001,k2=0.004,k3=0,k4=0.002"
NEW = None  # in place of a text to be replaced: the file is new


@dataclass(frozen=True)
class Thing:
    """What is added: in each file the text that is replaced, and by what."""

    edits: dict[str, list[tuple[str | None, str]]]
    files: int  # at most

    @property
    def changed(self) -> int:
        """Files that are touched."""
        return len(self.edits)


THINGS = {
    "a policy": Thing(
        {
            "two_at_a_time.py": [
                (
                    NEW,
                    """
from dataclasses import dataclass
from typing import ClassVar

from kendall.policies import Dispatch, Policy, WaitUntil


@dataclass(frozen=True, kw_only=True)
class TwoAtATime(Policy):
    name: ClassVar[str] = "two-at-a-time"
    def decide(self, state, now):
        server = state.empty_server()
        if server is None or not state.waiting:
            return WaitUntil(float("inf"))
        first = [each.request.id for each in state.waiting[:2]]
        return Dispatch(tuple(first), server.id)
""",
                )
            ]
        },
        files=1,
    ),
    "an order": Thing(
        {
            "policies/orders/last_in.py": [
                (
                    NEW,
                    '''
"""The most urgent by twice its priority."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from kendall.policies.orders.order import Form, Order


@dataclass(frozen=True, kw_only=True)
class TwicePriority(Order):
    """Lower priorities first."""

    name: ClassVar[str] = "twice-priority"

    @cached_property
    def form(self) -> Form:
        return Form(quantity="priority", weight=2.0)
''',
                )
            ]
        },
        files=1,
    ),
    "a knob of the queue": Thing(
        {
            "queueing/engine_bounds.py": [
                (
                    "    max_num_seqs: int | None = None  # requests in service\n",
                    "    max_num_seqs: int | None = None  # requests in service\n"
                    "    spare_slots: int = 0  # of these, kept free\n",
                )
            ],
            "queueing/description/arguments.py": [
                (
                    "    max_num_seqs: int | None\n",
                    "    max_num_seqs: int | None\n    spare_slots: int\n",
                ),
                (
                    '    "max_num_seqs": whole_number,\n',
                    '    "max_num_seqs": whole_number,\n'
                    '    "spare_slots": lambda _, given: given,\n',
                ),
            ],
            "queueing/description/parts.py": [
                (
                    "        return min((bound for bound in bounds if bound is not None), "
                    "default=None)\n",
                    "        most = min((bound for bound in bounds if bound is not None), "
                    "default=None)\n"
                    "        return None if most is None else most - "
                    "self.engine.bounds.spare_slots\n",
                ),
            ],
            "queueing/commands/queue_options.py": [
                (
                    "    max_context_tokens: int | None = option(\n",
                    '    spare_slots: int = option(ENGINE, "Slots kept free.", default=0)\n'
                    "    max_context_tokens: int | None = option(\n",
                )
            ],
        },
        files=6,
    ),
    "a queueing model": Thing(
        {
            "queueing/prediction/solvers/of_three.py": [
                (
                    NEW,
                    '''
"""Three servers, one request each: a number instead of a model."""

from __future__ import annotations

from typing import Any

from kendall.policies.immediate import Single
from kendall.queueing.prediction.solver import Solver, answered
from kendall.queueing.queue import Queue
from kendall.queueing.result import Quantiles


def _covers(queue: Queue) -> tuple[str, ...]:
    mine = isinstance(queue.policy, Single) and queue.engine.servers == 3
    return ("exact",) if mine else ()


def _solve(queue: Queue, arrival_rate: float) -> dict[str, Any]:
    return answered(Quantiles(0.125), Quantiles(0.25), 1.0, None) | {
        "service_time": Quantiles(0.125),
        "time_to_first_token": Quantiles(None),
        "inter_token_latency": Quantiles(None),
        "loss_fraction": 0.0,
    }


SOLVERS = (Solver(_covers, {"exact": _solve}),)
''',
                )
            ]
        },
        files=1,
    ),
    "a metric": Thing(
        {
            "server/telemetry/metrics.py": [
                (
                    "        self.load = LoadGauges(self.registry)\n",
                    "        self.load = LoadGauges(self.registry)\n"
                    '        self.gauge_of("spare_time_seconds", "Time to spare", lambda: 42.0)\n',
                )
            ]
        },
        files=1,
    ),
    "an option": Thing(
        {
            "server/settings.py": [
                (
                    "    replicas: int = option(\n",
                    "    greeting: str = option(\n"
                    '        Panel.LISTENING, "Words for the start.", default="hello"\n    )\n'
                    "    replicas: int = option(\n",
                )
            ]
        },
        files=1,
    ),
    "an assumption": Thing(
        {
            "queueing/estimation/assumptions/forecast_assumptions.py": [
                (
                    "FORECAST_TESTS = (\n",
                    "FORECAST_TESTS = (\n"
                    "    AssumptionTest(\n"
                    '        "full_moon", lambda _: Assumption("full_moon", True, 1.0, "as ever")\n'
                    "    ),\n",
                )
            ]
        },
        files=1,
    ),
    "a route": Thing(
        {
            "server/http/app.py": [
                (
                    '    @app.get("/version")\n',
                    '    @app.get("/tea")\n'
                    "    async def tea() -> dict[str, str]:\n"
                    '        return {"kind": "green"}\n\n'
                    '    @app.get("/version")\n',
                )
            ]
        },
        files=1,
    ),
}
GATEWAY = """
import asyncio, json
from tests.server.asgi import call, running
from tests.virtual_time import run_virtual

async def main():
    async with running() as (app, gateway):
        metrics = await call(app, "GET", "/metrics")
        tea = await call(app, "GET", "/tea")
        lines = metrics.body.decode().splitlines()
        (gauge,) = [line for line in lines if line.startswith("kendall_spare")]
        return {"gauge": gauge, "tea": tea.json()}

print(json.dumps(run_virtual(main())))
"""
LOOK = """
import json
from tests.server.test_live import look_of
print(json.dumps(sorted(look_of("single").comparison.assumptions)))
"""


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The product with one more of each."""
    root = tmp_path_factory.mktemp("scratch")
    scratch_product(root)
    for thing in THINGS.values():
        for name, edits in thing.edits.items():
            path = root / name
            for old, new in edits:
                if old is NEW:
                    assert not path.exists()
                    path.write_text(new, encoding="utf-8")
                    continue
                text = path.read_text(encoding="utf-8")
                assert text.count(old) == 1, (name, old)
                path.write_text(text.replace(old, new), encoding="utf-8")
    return root


def said(root: Path, *arguments: str, **variables: str) -> Any:
    """What a program of the scratch copy prints, as JSON."""
    done = run_in(root, *arguments, **variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def predicted(root: Path, policy: str, *more: str, command: str = "predict") -> Any:
    given = ["--latency", LAW, "--output-tokens", "uniform:low=8,high=24", "--arrival-rate", "5"]
    return said(root, "-m", "kendall", command, "--policy", policy, *given, *more, "--json")


@pytest.mark.parametrize("name", THINGS)
def test_each_takes_as_few_files_as_the_map_says(name: str) -> None:
    thing = THINGS[name]
    assert thing.changed <= thing.files


def test_a_policy_and_an_order(scratch: Path) -> None:
    own = ("--policy-module", "two_at_a_time.py", "--json")
    listed = said(scratch, "-m", "kendall", "policies", *own)["policies"]
    assert "two-at-a-time" in [each["name"] for each in listed]
    (dynamic,) = (each for each in listed if each["name"] == "dynamic")
    assert "twice-priority" in [each["name"] for each in dynamic["orders"]]


@pytest.mark.slow
def test_they_are_simulated(scratch: Path) -> None:
    own = predicted(scratch, "two-at-a-time", "--policy-module", "two_at_a_time.py")
    assert (own["method"], own["stable"]) == ("simulation", True)
    assert predicted(scratch, "dynamic:order=twice-priority", command="simulate")["stable"]
    knob = ("--spare-slots", "7")
    run = predicted(scratch, "capped:max_batch_size=8", *knob, command="simulate")
    assert run["batch_size"]["mean"] == 1.0


@pytest.mark.left_out
def test_a_knob_and_a_model(scratch: Path) -> None:
    found = predicted(scratch, "capped:max_batch_size=8", "--spare-slots", "3")
    assert found["effective_max_batch_size"] == 5
    three = predicted(scratch, "single", "--servers", "3")
    assert (three["method"], three["queueing_delay"]["mean"]) == ("exact", 0.125)


def test_an_option_of_the_gateway(scratch: Path) -> None:
    shown = said(
        scratch, "-m", "kendall", "serve", "--show-config", "--json", KENDALL_GREETING="good day"
    )
    assert shown["greeting"] == {"value": "good day", "source": "KENDALL_GREETING"}


def test_a_metric_and_a_route(scratch: Path) -> None:
    assert said(scratch, "-c", GATEWAY) == {
        "gauge": "kendall_spare_time_seconds 42.0",
        "tea": {"kind": "green"},
    }


def test_an_assumption(scratch: Path) -> None:
    assert "full_moon" in said(scratch, "-c", LOOK)
