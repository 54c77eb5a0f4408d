"""`kendall profiles`: the latency profiles that a name stands for."""

from __future__ import annotations

import json

import typer

from kendall.policies.text import SpecError
from kendall.queueing.commands.shared_options import Json
from kendall.queueing.commands.terminal import console, say
from kendall.queueing.latency.profile import find_profile, profile_names

app = typer.Typer(add_completion=False)


@app.command("profiles")
def profiles_command(
    *,
    as_json: Json = False,
) -> None:
    """List the latency profiles that `--latency NAME` can name: those that `kendall calibrate` has
    measured on this machine, which come first where two have one name, and those shipped. Seconds.

    Examples: `kendall profiles`, and `kendall predict --latency tiny --policy single --arrival-rate
    5 --output-tokens geometric:mean=32` uses one.
    """
    found = []
    for name in profile_names():
        try:
            found.append(find_profile(name))
        except SpecError as error:  # a file of the user's that is none
            typer.echo(f"kendall: warning: {error}", err=True)
    if as_json:
        listed = [{**each.to_dict(), "law": each.profile.law.as_dict()} for each in found]
        typer.echo(json.dumps({"profiles": listed}))
        return
    to = console()
    for each in found:
        first, *more = each.describe()
        say(to, first.removeprefix("profile "))
        for line in (*more, f"law: {each.profile.law}"):
            say(to, f"  {line}", hang=4)
