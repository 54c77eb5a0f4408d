"""The options of the http engine: what goes with it, what does not, and the engine itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kendall.policies.text import SpecError
from kendall.server.engines.proxied import server_urls
from kendall.server.settings import Settings

if TYPE_CHECKING:
    from kendall.server.engines.http.engine import HttpEngine

ENGINE_ARGS = ("max_num_seqs", "max_model_len")  # that it has
EXAMPLE = "for example --engine-url http://localhost:8000"


def check_http(settings: Settings, *, named: bool) -> None:
    """`named`: --served-model-name was given. Raises SpecError."""
    given = {
        "--engine-url": settings.engine_url,
        "--engine-api-key": settings.engine_api_key,
        "--tokenizer": settings.tokenizer,
    }
    if settings.engine != "http":
        if misplaced := [option for option, value in given.items() if value]:
            raise SpecError(
                f"got {misplaced[0]} with --engine {settings.engine}; expected --engine http"
            )
        return
    if not settings.engine_url:
        raise SpecError(
            f"got --engine http without --engine-url; expected the URL of a server with OpenAI's "
            f"API, {EXAMPLE}"
        )
    server_urls(settings.engine_url)
    _check_rest(settings, named=named)


def _check_rest(settings: Settings, *, named: bool) -> None:
    """What the servers behind decide, or what would change their answers."""
    if settings.replicas > 1:
        raise SpecError(
            f"got --replicas {settings.replicas} with --engine http; expected --engine-url once "
            "for each server that runs already: repeat it"
        )
    not_possible = {
        "--served-model-name": (named, "the servers behind decide the names"),
        "--allow-forced-lengths": (
            settings.allow_forced_lengths,
            "max_tokens and ignore_eos, where the servers behind have it",
        ),
        "--queue-events": (settings.overload.queue_events, "answers that are passed on unchanged"),
        "--sse-keep-alive-interval": (
            settings.overload.sse_keep_alive_interval > 0,
            "answers that are passed on unchanged",
        ),
    }
    for option, (is_given, expected) in not_possible.items():
        if is_given:
            raise SpecError(f"got {option} with --engine http; expected {expected}: leave it out")
    if unknown := set(settings.engine_args) - set(ENGINE_ARGS):
        raise SpecError(
            f"got engine argument {min(unknown)!r} with --engine http; expected one of "
            f"{', '.join(ENGINE_ARGS)}: the others are those of the servers behind"
        )


def http_engine(settings: Settings) -> HttpEngine:
    """Raises SpecError: the tokenizer cannot be read."""
    from kendall.server.engines.http.engine import HttpEngine  # noqa: PLC0415 - heavy
    from kendall.server.engines.http.pool import HttpOptions  # noqa: PLC0415

    return HttpEngine(
        HttpOptions(
            urls=tuple(server_urls(settings.engine_url)),
            model=settings.model or None,
            key=settings.engine_api_key,
            tokenizer=None if settings.tokenizer is None else str(settings.tokenizer),
            max_num_seqs=settings.engine_args.get("max_num_seqs"),
            max_model_len=settings.engine_args.get("max_model_len"),
        )
    )
