"""A new order of service is one class in one new file of `policies/orders`: in a scratch copy with
three such files, and nothing else changed, each has its text, is listed, served, simulated by the
compiled queues as by its policy, and predicted where the analysis has its form.
"""

from __future__ import annotations

import filecmp
import json
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from kendall.policies.orders import ORDERS, PARAMETERS
from tests.scratch_product import ROOT, run_in, scratch_product

HEAD = """
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from kendall.policies.orders.order import Aging, Form, Order, parameter

"""
STEPS = '''
@dataclass(frozen=True, kw_only=True)
class Steps(Aging):
    """By classes of predicted length, the longer ones first: not interrupted."""

    gain: float = parameter("a number > 0", lambda gain: gain > 0, 3.0)
    name: ClassVar[str] = "steps"
    predicts: ClassVar[bool] = True
    assumption: ClassVar[str] = "the longest first, {name}"

    @cached_property
    def form(self) -> Form:
        return Form(quantity="prediction", weight=-self.gain, aging=self.aging)
'''
CREDIT = '''
@dataclass(frozen=True, kw_only=True)
class Credit(Order):
    """Shortest predicted first, with a credit for each token made; preemptive."""

    credit: float = parameter("a number from 0 to 1", lambda credit: 0 <= credit <= 1)
    name: ClassVar[str] = "credit"
    predicts: ClassVar[bool] = True
    preemptive: ClassVar[bool] = True

    @cached_property
    def form(self) -> Form:
        return Form(quantity="prediction", per_token=-self.credit, settled=0.9)
'''
FIRST_STEPS = '''
@dataclass(frozen=True, kw_only=True)
class FirstSteps(Aging):
    """Predictions that lose with every token, and levels beside them."""

    penalty: float = parameter("a number >= 0", lambda penalty: penalty >= 0, 0.0)
    quantum: int = parameter("tokens, at least 1", lambda tokens: tokens >= 1, 8)
    name: ClassVar[str] = "first-steps"
    predicts: ClassVar[bool] = True
    preemptive: ClassVar[bool] = True

    @cached_property
    def form(self) -> Form:
        levels = {"starts": (0, 3, self.quantum), "every": 4}
        return Form(quantity="prediction", weight=0.1, per_token=self.penalty, **levels)
'''
ASK = """
import json, sys
import numpy as np
import kendall
from kendall.policies import QueueState, Request, Server, Waiting, format_policy, parse_policy
from kendall.policies.contract import checked
from kendall.policies.ordered import in_order
from kendall.queueing.queue import Queue
from kendall.queueing.simulation import experiment, fast
from tests.queueing.test_kernels import assert_same, both

policy, law = parse_policy(sys.argv[1]), "k1=0.001,k2=0.004,k3=0,k4=0.002"
queue = [Waiting(Request(str(n), 1.0 * n, 1, 99, n)) for n in (5, 3, 9)]
state = QueueState(in_order(policy, queue), [Server(0)])
served = policy.decide(state, 10.0).request_ids
faults = [each for each in checked(policy, state, 10.0).values() if each]
model = Queue.read(
    sys.argv[1], "lognormal:mu=2.5,sigma=0.7", law, predictor="lognormal:sigma=0.5",
    max_num_seqs=8, max_output_tokens=64,
)
for servers, patience in ((1, None), (2, 0.1)):
    several = model.but(servers=servers, patience=patience)
    assert_same(*both(several, 0.85 * several.largest_stable_rate, 1000))
rate = float(sys.argv[2]) * model.largest_stable_rate
given = {
    "output_tokens": model.requests.output_tokens, "latency": law,
    "predictor": "lognormal:sigma=0.5", "max_output_tokens": 64,
}
answer = kendall.predict(sys.argv[1], rate, **given)
run = experiment.simulate_run(model, rate, 400_000, np.random.SeedSequence(1))
print(json.dumps({
    "text": format_policy(policy), "faults": faults, "served": served,
    "compiled": fast.is_compiled(model), "method": answer.method,
    "assumptions": answer.assumptions, "delay": answer.queueing_delay.mean,
    "simulated": float(run.queueing_delay[4000:].mean()),
}))
"""


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The product with three more files."""
    root = tmp_path_factory.mktemp("scratch")
    scratch_product(root, ["policies"])
    orders = root / "policies" / "orders"
    for name, source in (("steps", STEPS), ("credit", CREDIT), ("first_steps", FIRST_STEPS)):
        (orders / f"{name}.py").write_text(HEAD + source, encoding="utf-8")
    found = filecmp.dircmp(root / "policies", ROOT / "policies", ignore=["__pycache__"])
    inside = found.subdirs["orders"]
    assert (found.left_only, found.diff_files, inside.diff_files) == ([], [], [])
    assert inside.left_only == ["credit.py", "first_steps.py", "steps.py"]
    return root


def asked(root: Path, policy: str, load: float = 0.6) -> dict[str, Any]:
    found = run_in(root, "-c", ASK, policy, str(load))
    assert found.returncode == 0, found.stderr
    answer: dict[str, Any] = json.loads(found.stdout)
    assert answer["faults"] == []
    assert answer["compiled"]
    return answer


def test_it_has_a_text_and_its_parameters_a_range(scratch: Path) -> None:
    listed = json.loads(run_in(scratch, "-m", "kendall", "policies", "--json").stdout)
    (dynamic,) = (each for each in listed["policies"] if each["name"] == "dynamic")
    (steps,) = (each for each in dynamic["orders"] if each["name"] == "steps")
    assert [each["name"] for each in steps["parameters"]] == ["aging", "gain"]
    shown = " ".join(run_in(scratch, "-m", "kendall", "policies").stdout.split())
    assert "steps[,aging=,gain=]" in shown
    assert "credit,credit=[,max_preemptions=]" in shown
    wrong = {
        "dynamic:order=steps,gain=0": "got gain=0; expected a number > 0",
        "single:order=credit": "got order credit without credit; expected credit=NUMBER",
        "dynamic:order=credit,credit=0.5": "got order credit, which interrupts a batch",
    }
    for text, said in wrong.items():
        code = f"from kendall.policies import parse_policy; parse_policy({text!r})"
        assert said in run_in(scratch, "-c", code).stderr


@pytest.mark.left_out
def test_batches_are_served_simulated_and_its_assumption_is_named(scratch: Path) -> None:
    found = asked(scratch, "dynamic:order=steps,gain=2")
    assert found["text"] == "dynamic:order=steps,gain=2"
    assert found["served"] == ["9", "5", "3"]
    assert found["method"] == "simulation"
    said = "the longest first, steps; predictor of the output lengths: lognormal:sigma=0.5"
    assert said in found["assumptions"]


def test_an_order_that_interrupts_nobody_is_predicted(scratch: Path) -> None:
    found = asked(scratch, "single:order=steps,gain=2")
    assert (found["served"], found["method"]) == (["9"], "exact")
    assert found["delay"] == pytest.approx(found["simulated"], rel=0.03)


@pytest.mark.slow
def test_an_order_that_interrupts_is_predicted(scratch: Path) -> None:
    found = asked(scratch, "single:order=credit,credit=0.5")
    assert (found["served"], found["method"]) == (["3"], "approximation")
    assert found["delay"] == pytest.approx(found["simulated"], rel=0.07)
    whole, known = asked(scratch, "single:order=credit,credit=1"), "single:order=trail,c=0.9"
    assert whole["delay"] == asked(ROOT, known)["delay"] != found["delay"]


@pytest.mark.slow
@pytest.mark.parametrize("penalty", ["", ",penalty=0.3"])
def test_ranks_that_fall_behind_with_every_token_are_simulated(scratch: Path, penalty: str) -> None:
    assert asked(scratch, f"single:order=first-steps{penalty}", 0.3)["method"] == "simulation"


def test_a_parameter_is_of_one_type_in_all_orders() -> None:
    """A text is read by its name."""
    for name in PARAMETERS:
        hints = [get_type_hints(order) for order in ORDERS.values()]
        assert len({str(each[name]) for each in hints if name in each}) == 1
