"""The options --policy-module and --json, which many commands have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from kendall.options import flag_option
from kendall.policies.registry import not_used, use_modules

ABOUT_MODULE = (
    "Module with policies of your own: its name, or the path of a .py file; repeatable. Packages "
    "with the entry point kendall.policies need no option."
)
PolicyModules = Annotated[list[str] | None, flag_option("", ABOUT_MODULE, "--policy-module")]
ABOUT_JSON = "Print one JSON object and nothing else."
Json = Annotated[bool, flag_option("", ABOUT_JSON, "--json")]


def use_policies(modules: Sequence[str] | None, *texts: str | None) -> None:
    """Make the policies of these modules known; a warning on stderr where a text names a built-in
    policy whose name a package has too. Raises SpecError.
    """
    use_modules(modules)
    for name in dict.fromkeys(text.partition(":")[0].strip() for text in texts if text):
        if (warning := not_used(name)) is not None:
            typer.echo(f"kendall: warning: {warning}", err=True)
