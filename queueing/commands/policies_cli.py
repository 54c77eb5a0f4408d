"""`kendall policies`: what a policy text can name."""

from __future__ import annotations

import typer

from kendall.policies.registry import every_policy
from kendall.queueing.commands.check_policy_cli import show_policies
from kendall.queueing.commands.shared_options import Json, PolicyModules, use_policies

app = typer.Typer(add_completion=False)


@app.command("policies")
def policies_command(
    *,
    policy_module: PolicyModules = None,
    as_json: Json = False,
) -> None:
    """List the policies that a text can name, each with its parameters, then the routes and orders
    that are values of `route` and `order`.

    Examples: `kendall policies`, or with policies of your own `kendall policies --policy-module
    shortest.py --json`.
    """
    use_policies(policy_module)
    show_policies(every_policy(), as_json)
