"""`kendall reproduce`: the documents' tables and figures. Progress goes to stderr; what was
found, to stdout and to --output.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Annotated

import typer
from rich.console import Console

from kendall.queueing.commands.shared_options import Json
from kendall.queueing.commands.terminal import console, say
from kendall.queueing.measurement.paths import folder_to_write, writing
from papers.reproduction.artefact import Artefact
from papers.reproduction.catalogue import CATALOGUE, chosen, make
from papers.reproduction.picture import draw_artefact
from papers.reproduction.report import as_object, page, save_data, text

app = typer.Typer(no_args_is_help=True, add_completion=False)
PERIOD = 1.5  # seconds between two lines while one artefact is computed
SAME = 20  # periods after which a step that goes on is said again, where nobody looks on
FAILED = 3  # exit status: a statement neither met nor explained


class Steps:
    """What is being computed, and since when."""

    def __init__(self, name: str, console: Console) -> None:
        self._name, self._console = name, console
        self._began, self._step = console.get_time(), "starting"
        self._done = Event()

    def say(self, step: str) -> None:
        """The step that begins now."""
        self._step = step

    def line(self, what: str) -> None:
        """One line of progress."""
        sys.stderr.write(
            f"{self._name:<20}{self._console.get_time() - self._began:6.1f} s  {what}\n"
        )
        sys.stderr.flush()

    def watch(self) -> None:
        """A line for each step that takes more than PERIOD (its own thread); again after PERIOD on
        a terminal, elsewhere after SAME of them.
        """
        same = 1 if self._console.is_terminal else SAME
        told, since = "", 0
        while not self._done.wait(PERIOD):
            since = since + 1 if self._step == told else same
            if since >= same:
                told, since = self._step, 0
                self.line(told)

    def end(self) -> None:
        """No more lines."""
        self._done.set()


@contextmanager
def told(name: str) -> Iterator[Steps]:
    """Lines of progress while the body runs."""
    steps = Steps(name, Console(stderr=True))
    steps.line("...")
    thread = Thread(target=steps.watch, daemon=True)
    thread.start()
    try:
        yield steps
    finally:
        steps.end()
        thread.join()


@app.command()
def reproduce(
    what: Annotated[
        list[str],
        typer.Argument(
            help=(
                "all | yang | inoue | chapter | slides, or tables and figures by name, for example "
                "yang-fig4."
            )
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            help="Folder for plots and data; with `all` also for the page README.md.",
            parser=folder_to_write,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compute the tables and figures of the papers and compare them with the published numbers.

    Exit status 3 if a published number is neither met nor explained.
    """
    artefacts = [_one(name, output) for name in chosen(what)]
    if output is not None and len(artefacts) == len(CATALOGUE):
        text_of_page = page(artefacts)
        with writing(path := output / "README.md"):
            path.write_text(text_of_page, encoding="utf-8")
    if as_json:
        typer.echo(json.dumps({"artefacts": [as_object(artefact) for artefact in artefacts]}))
    else:
        to = console()
        for line in "\n\n".join(text(artefact) for artefact in artefacts).split("\n"):
            say(to, line, hang=8)
    if any(artefact.failed for artefact in artefacts):
        raise typer.Exit(FAILED)


def _one(name: str, output: Path | None) -> Artefact:
    with told(name) as steps:
        artefact = make(name, steps.say)
        if output is not None:
            steps.say("drawing")
            with writing(output):
                output.mkdir(parents=True, exist_ok=True)
            save_data(artefact, output / f"{name}.json")
            if artefact.panels:
                draw_artefact(artefact, output / f"{name}.png")
        met = sum(
            statement.verdict.startswith(("met", "within", "holds"))
            for statement in artefact.statements
        )
        steps.line(
            f"done: {met} of {len(artefact.statements)} met or hold, {len(artefact.failed)} "
            "unexplained"
        )
    return artefact


if __name__ == "__main__":
    app()
