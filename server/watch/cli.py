"""`kendall watch`: servers whose queue is not ours, from their spans, their metrics, or what a
Prometheus holds of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from kendall.options import with_options
from kendall.policies.text import SpecError
from kendall.queueing.commands.shared_options import Json
from kendall.server.watch.options import PANELS, SourceOptions, WatchOptions, WatchReportOptions

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
    """Watch servers that run already: the delays that they have beside those that the model
    predicts for them.
    """
    _check(options, urls or [])
    if options.source.prometheus is not None:
        if urls or options.source.otlp is not None:
            raise SpecError("got --prometheus with another source; expected one of them")
        from kendall.server.watch.track_record import track_record  # noqa: PLC0415 - heavy

        track_record(options, json=json)
    elif options.source.otlp is not None:
        from kendall.server.watch.live import watch  # noqa: PLC0415 - heavy

        watch(options, urls or [], json=json)
    elif urls and options.report.once:
        from kendall.server.watch.scraping import watch_once  # noqa: PLC0415 - heavy

        watch_once(options, urls, json=json)
    elif urls:
        if json:
            raise SpecError("got --json without --once; expected both, or GET /admin/watch")
        from kendall.server.watch.live_record import watch_urls  # noqa: PLC0415 - heavy

        watch_urls(options, urls)
    else:
        raise SpecError(
            "got no source; expected --otlp, --prometheus, or the URL of a server: `kendall watch "
            "--help` explains each"
        )


def _check(options: WatchOptions, urls: Sequence[str]) -> None:
    """Raises SpecError for an option that the source does not read, and for what would be noticed
    after the watch.
    """
    report = options.report
    _check_read(options)
    if twice := [url for number, url in enumerate(urls) if url in urls[:number]]:
        raise SpecError(f"got {twice[0]} twice; expected each server once")
    if options.queue.latency is not None:
        from kendall.queueing.latency.profile import load_law  # noqa: PLC0415 - heavy

        load_law(options.queue.latency)
    port = (options.source.otlp or "").rpartition(":")[2]
    if not report.once and port == str(report.port) != "0":
        raise SpecError(
            f"got --otlp {options.source.otlp} with --port {report.port}; expected two ports"
        )
    if options.queue.slo is not None and options.source.otlp is None:
        raise SpecError(
            "got --slo with counters alone, which have no quantiles; expected none: leave it out"
        )
    if report.output is not None and options.source.prometheus is None:
        raise SpecError(f"got --output {report.output} without --prometheus; expected both")


def _check_read(options: WatchOptions) -> None:
    """Raises SpecError for an option that only another source reads."""
    source, report = options.source, options.report
    defaults = WatchReportOptions()
    past = SourceOptions()
    if source.prometheus is None:
        for name in ("since", "match"):
            if getattr(source, name) != getattr(past, name):
                raise SpecError(f"got --{name} without --prometheus; expected both")
        if source.every is not None and (source.otlp is not None or report.once):
            raise SpecError(
                "got --every; expected it with --prometheus, or with URLs without --once"
            )
        if report.seconds != defaults.seconds and not report.once:
            raise SpecError("got --for without --once; expected both")
    ends = source.prometheus is not None or report.once
    if ends and (report.host, report.port) != (defaults.host, defaults.port):
        flag = "--port" if report.port != defaults.port else "--host"
        what = "--prometheus" if source.prometheus is not None else "--once"
        raise SpecError(f"got {flag} with {what}, which serves no page; expected one of them")
    if source.prometheus is not None and (report.once or report.seconds != defaults.seconds):
        flag = "--once" if report.once else "--for"
        raise SpecError(f"got {flag} with --prometheus, which ends anyway; expected one of them")
