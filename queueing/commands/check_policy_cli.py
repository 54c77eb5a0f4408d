"""`kendall check-policy`."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from kendall.policies.core import Policy, QueueState
from kendall.policies.decision import LONGEST_DECISION
from kendall.policies.ordered import KEYS
from kendall.policies.orders import ORDERS
from kendall.policies.orders.order import Order
from kendall.policies.parameters import parameters_of
from kendall.policies.registry import Listed, every_policy
from kendall.policies.routes import ROUTES
from kendall.policies.text import counted, format_policy, parse_policy
from kendall.queueing.commands.shared_options import Json, PolicyModules, use_policies
from kendall.queueing.commands.terminal import console, say

if TYPE_CHECKING:
    from kendall.queueing.simulation.policy_check import Checked

app = typer.Typer(add_completion=False)
QUICK = "a decision takes far less than a second"
STATES = 2000
FIRST = 50  # states in which one decision is timed
BROKEN = 3  # exit status: a check failed
LIMIT = 30.0  # seconds that all checks may take; a few are usual


class _TooLongError(BaseException):  # none that a policy catches
    """A decision does not return."""


@app.command("check-policy")
def check_policy_command(
    *,
    policy: Annotated[
        str | None,
        typer.Argument(help="The policy to check, for example shortest:max_batch_size=8."),
    ] = None,
    policy_module: PolicyModules = None,
    states: Annotated[
        int, typer.Option("--states", help="Number of random queue states.", min=1)
    ] = STATES,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the states.", min=0)] = 0,
    as_json: Json = False,
) -> None:
    """Check that a policy keeps the contracts of every policy, in random queue states and in a
    simulated run. Without POLICY, list all policies.
    """
    use_policies(policy_module, policy)
    if policy is None:
        show_policies(every_policy(), as_json)
        return
    parsed = parse_policy(policy)
    checked = _within(LIMIT, parsed, states, seed)
    broken = [each for each in checked if each.fault is not None]
    if as_json:
        typer.echo(json.dumps(_as_object(parsed, checked)))
    else:
        _show(console(), parsed, checked, states)
    if broken:
        raise typer.Exit(BROKEN)


def _within(limit: float, policy: Policy, states: int, seed: int) -> list[Checked]:
    """Every contract, those too that could not be checked in the time."""
    from kendall.queueing.simulation.policy_check import (  # noqa: PLC0415 - numpy, which other commands' --help need not wait for
        CONTRACT_NAMES,
        RUN,
        Checked,
        check_policy,
        random_states,
    )

    found: list[Checked] = []
    fault = None
    if any(_is_slow(policy, state, now) for state, now in random_states(FIRST, seed)):
        fault = f"a decision took over {LONGEST_DECISION:g} s; expected far less"
    else:
        try:
            with _alarm(limit):
                found += check_policy(policy, states=states, seed=seed)
        except _TooLongError:
            fault = f"the checks did not end within {limit:g} s"
    left = (*CONTRACT_NAMES, RUN)[len(found) :]
    not_checked = [Checked(name, note="not checked, as the policy is too slow") for name in left]
    return [Checked(QUICK, fault), *found, *not_checked]


def _is_slow(policy: Policy, state: QueueState, now: float) -> bool:
    try:
        with _alarm(LONGEST_DECISION):
            policy.decide(state, now)
    except _TooLongError:
        return True
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - for the checks to tell
        pass
    return False


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """A policy that sleeps would keep the command for ever."""

    def ring(*_: object) -> None:
        raise _TooLongError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _show(to: Console, policy: Policy, checked: list[Checked], states: int) -> None:
    for each in checked:
        if each.fault is not None:
            say(to, f"FAILED   {each.contract}: {each.fault}", hang=9)
        elif each.note is not None:
            say(to, f"-        {each.contract}: {each.note}", hang=9)
        else:
            say(to, f"ok       {each.contract}", hang=9)
    say(to, f"{format_policy(policy)} {_verdict(checked, states)}")


def _verdict(checked: list[Checked], states: int) -> str:
    """The number of contracts that are broken, and of those that were not checked everywhere."""
    broken = sum(each.fault is not None for each in checked)
    unchecked = sum(each.note is not None for each in checked)
    if broken:
        text = f"breaks {broken} of {counted(len(checked), 'contract')}"
    elif unchecked:
        text = f"keeps {len(checked) - unchecked} of {counted(len(checked), 'contract')}"
    else:
        text = "keeps its contracts"
    if unchecked:
        text += f"; {unchecked} not checked, or not in every state"
    if checked[0].fault is not None:  # too slow to be asked in the states
        return text
    run = "no simulated run" if checked[-1].note is not None else "one simulated run"
    return f"{text} ({states:,} states, {run})"


def _as_object(policy: Policy, checked: list[Checked]) -> dict[str, Any]:
    return {
        "policy": format_policy(policy),
        "passed": all(each.fault is None for each in checked),
        "contracts": [
            {"contract": each.contract, "fault": each.fault, "note": each.note} for each in checked
        ],
    }


def show_policies(listed: list[Listed], as_json: bool) -> None:
    """With their parameters, the routes and the orders."""
    if as_json:
        typer.echo(json.dumps({"policies": [each.to_dict() for each in listed]}))
        return
    to = console()
    for each in listed:
        say(to, f"{each.fault or _form(each)}  ({each.source})", hang=2)
    say(to, f"route: {', '.join(ROUTES)}", hang=7)
    say(to, f"order: {', '.join(map(_order_form, ORDERS.values()))}", hang=7)


def _form(each: Listed) -> str:
    assert each.cls is not None
    of_orders = KEYS[1:]
    parameters = [each for each in parameters_of(each.cls).values() if each.name not in of_orders]
    keys = [
        f"{parameter.name}={parameter.kind.upper()}"
        if parameter.required
        else f"[{parameter.name}={parameter.kind.upper()}]"
        for parameter in parameters
    ]
    return each.name + (":" + ",".join(keys) if keys else "")


def _order_form(cls: type[Order]) -> str:
    """With its own parameters: `trail[,aging=,c=]`."""
    fields = [each for each in dataclasses.fields(cls) if each.init]
    needed = "".join(f",{each.name}=" for each in fields if each.default is dataclasses.MISSING)
    names = [each.name for each in fields if each.default is not dataclasses.MISSING]
    if cls.preemptive:
        names.append("max_preemptions")
    free = ",".join(f"{name}=" for name in names)
    return cls.name + needed + (f"[,{free}]" if free else "")
