"""`kendall policies`: what a policy text can name."""

from __future__ import annotations

from typing import Annotated

import typer

from kendall.policies.registry import every_policy
from kendall.queueing.commands.check_policy_cli import show_policies
from kendall.queueing.commands.policy_option import PolicyModules, use_policies

app = typer.Typer(add_completion=False)


@app.command("policies")
def policies_command(
    *,
    policy_module: PolicyModules = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
) -> None:
    """List the policies that a text can name, each with its parameters, then the routes and orders
    that are values of `route` and `order`.

    Examples: `kendall policies`, or with policies of your own `kendall policies --policy-module
    shortest.py --json`.
    """
    use_policies(policy_module)
    show_policies(every_policy(), as_json)
