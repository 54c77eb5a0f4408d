"""`kendall watch`: servers whose queue is not ours, from their spans, their metrics, or what a
Prometheus holds of them.
"""

from __future__ import annotations

from typing import Annotated

import typer

from kendall.options import with_options
from kendall.policies.text import SpecError
from kendall.queueing.commands.shared_options import Json
from kendall.server.watch.options import PANELS, WatchOptions

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.command("watch")
@with_options(PANELS)
def watch_command(
    options: WatchOptions,
    urls: Annotated[
        list[str] | None,
        typer.Argument(help="URLs of running servers, for example http://127.0.0.1:8000."),
    ] = None,
    *,
    json: Json = False,
) -> None:
    """Watch servers that somebody else runs: the delays that they have beside those that the model
    predicts for them.
    """
    if options.source.prometheus is not None:
        from kendall.server.watch.track_record import track_record  # noqa: PLC0415 - heavy

        track_record(options, json=json)
    elif options.source.otlp is not None or urls:
        from kendall.server.watch.live import watch  # noqa: PLC0415 - heavy

        watch(options, urls or [], json=json)
    else:
        raise SpecError(
            "got no source; expected --otlp, the URL of a server, or --prometheus: "
            "`kendall watch --help` explains each"
        )
