"""Replaces `kendall policies` by a command that ends in the way that a test asks for."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kendall.queueing.errors import CommandError

app = typer.Typer(add_completion=False)


@app.command("policies")
def fail(how: Annotated[str, typer.Argument(help="What happens.")]) -> None:
    """Fail."""
    match how:
        case "interrupted":
            raise KeyboardInterrupt
        case "aborted":
            raise typer.Abort
        case "status":
            raise typer.Exit(7)
        case "known":
            raise CommandError("nobody answers")
        case "disk":
            raise OSError(28, "No space left on device")
        case "odd":
            raise ZeroDivisionError("division by zero")
        case _:
            sys.stdout.write(f"{how}\n")
