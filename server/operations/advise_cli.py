"""`kendall advise`: what a running gateway's own model says should be changed, asked at `GET
/admin/advice`.

Exit status: 2 for a URL that is no gateway, or arguments that it cannot use; 3 where no target has
a stable choice; 1 where nobody listens, or the gateway cannot advise now.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import httpx
import typer

from kendall.options import flag_option, option, with_options
from kendall.policies.text import SpecError
from kendall.queueing.commands.environment_variables import fitting
from kendall.queueing.commands.queue_options import WeightOptions
from kendall.queueing.commands.shared_options import Json
from kendall.queueing.commands.terminal import console, say, working
from kendall.queueing.errors import CommandError
from kendall.remote import (
    A_GATEWAY,
    REFUSED,
    SYSTEM,
    AdminAccess,
    Trust,
    check_no_credentials,
    key_refusal,
    server_root,
    unanswered,
)
from kendall.server.operations.advice_table import show

app = typer.Typer(no_args_is_help=True, add_completion=False)
# seconds: an advice for several servers is simulated, on a machine that may have other work; the
# gateway itself gives up earlier
TIMEOUT = 1500.0


@dataclass(frozen=True, kw_only=True)
class AdviceOptions:
    """Parameters of `GET /admin/advice`; None: not given."""

    objective: str | None = option(
        "",
        (
            "What to optimise: delay | throughput | v1 | v2 | clipped | slo. Default: delay, or "
            "slo with --slo. Policies are compared by their mean sojourn time."
        ),
    )
    slo: str | None = option(
        "",
        (
            "Service level objective, for example p99_queueing_delay=2s; implies --objective slo. "
            "Several with commas are all kept, and settings are compared by the first: "
            "p99_ttft<=500ms,p99_itl<=50ms."
        ),
    )
    weights: WeightOptions = field(default_factory=WeightOptions)
    max_clipped_fraction: float | None = option(
        "",
        (
            "Largest fraction of answers that a token limit may clip, also with --slo. Default: "
            "0.05."
        ),
    )
    family: str | None = option(
        "",
        (
            "Distribution family for output lengths beyond the token limits in force, for example "
            "lognormal."
        ),
    )
    target: str | None = option(
        "",
        "What to choose: batch-size | max-output-tokens | policy | servers | order. Default: all "
        "but order.",
    )
    routing: str | None = option(
        "",
        (
            "With several servers: how the load balancer sends the requests that the one queue is "
            "compared with, random | round_robin | least_requests (simulated). Default: random and "
            "round_robin."
        ),
    )
    rate_factor: float | None = option(
        "", "Factor on the arrival rate that the advice is for: 1.5 is half more. Default: 1."
    )

    def parameters(self, ctx: typer.Context) -> dict[str, str]:
        """The parameters that are given, by name, without those from the environment that the
        objective does not read.
        """
        values = dataclasses.asdict(self)
        values |= values.pop("weights")
        given = fitting(ctx, values, values.keys() - _unread(self.objective, self.slo))
        return {name: str(value) for name, value in given.items() if value is not None}


@app.command()
@with_options()
def advise(
    ctx: typer.Context,
    url: Annotated[
        str, typer.Argument(help="URL of a running gateway, for example http://127.0.0.1:8080.")
    ],
    asked: AdviceOptions,
    *,
    api_key: Annotated[str | None, flag_option("", "Key sent as a bearer token.")] = None,
    access: AdminAccess,
    as_json: Json = False,
) -> None:
    """Ask a running gateway which batch size, token limit, policy and number of servers its
    model recommends, with the expected gain.
    """
    params = asked.parameters(ctx)
    _check(params)
    check_no_credentials(url, "a URL")
    found = ask(url, params, access.key(url, api_key), access.trust)
    if as_json:
        sys.stdout.write(json.dumps(found) + "\n")
    elif found["advice"]:
        show(found["advice"], console(), found["load_balancer"], found["rate"])
        if asked.routing is not None and found["load_balancer"] is None:
            say(
                console(), f"{asked.routing}: not compared: there is one server, or no steady state"
            )
    if not found["advice"]:
        why = found["reason"] or "the gateway gave no reason"
        raise CommandError(f"no advice: {why}{'; ask again then' if 'ended' in why else ''}")
    if all(each["best"] is None for each in found["advice"]):
        raise typer.Exit(3)


def _unread(objective: str | None, slo: str | None) -> set[str]:
    """The options that belong to other objectives than this one."""
    from kendall.queueing.choosing.gain.criterion import WEIGHS  # noqa: PLC0415 - heavy

    name = objective or ("delay" if slo is None else "slo")
    others = {key for key, names in WEIGHS.items() if name not in names}
    return others if name == "slo" else {*others, "slo"}


def _check(params: Mapping[str, str]) -> None:
    """What the gateway would refuse. Raises SpecError."""
    from kendall.queueing.choosing.advice.advise import TARGETS, parse_objective  # noqa: PLC0415 - heavy: --help is instant
    from kendall.queueing.choosing.advice.load_balancer import routings_of  # noqa: PLC0415 - heavy
    from kendall.queueing.choosing.advice.rates import rate_factor_of  # noqa: PLC0415 - heavy

    parse_objective(params)
    routings_of(params)
    rate_factor_of(params)
    if params.get("target") not in (None, *TARGETS):
        raise SpecError(f"got --target {params['target']!r}; expected one of {', '.join(TARGETS)}")


def ask(
    url: str, params: Mapping[str, str], key: str | None = None, trust: Trust = SYSTEM
) -> dict[str, Any]:
    """The gateway's answer. Raises SpecError: no gateway there, or it refused; CommandError:
    nobody answers, or it cannot now.
    """
    response, answer = _asked(url, params, key, trust)
    if response.is_success and isinstance(answer, dict) and isinstance(answer.get("advice"), list):
        return {name: answer.get(name) for name in ("advice", "load_balancer", "rate", "reason")}
    raise _refusal(url, response.status_code, answer)


def _asked(
    url: str, params: Mapping[str, str], key: str | None, trust: Trust
) -> tuple[httpx.Response, Any]:
    """The response and its JSON."""
    try:
        with working("the gateway predicts"):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            settings: dict[str, Any] = {
                "headers": headers,
                "timeout": TIMEOUT,
                "verify": trust.verification(url),
                "trust_env": False,
            }
            response = httpx.get(
                server_root(url) + "/admin/advice", params=dict(params), **settings
            )
        answer = response.json()
    except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
        raise SpecError(f"got {url}; {A_GATEWAY} ({error})") from None
    except httpx.HTTPError as error:
        raise CommandError(
            f"no answer from {url} ({unanswered(error, url)}); {A_GATEWAY}"
        ) from None
    except ValueError:
        raise SpecError(f"got {url}, whose answer is not a gateway's; {A_GATEWAY}") from None
    return response, answer


def _refusal(url: str, status: int, answer: Any) -> SpecError | CommandError:
    message = (
        answer["error"].get("message")
        if isinstance(answer, dict) and isinstance(answer.get("error"), dict)
        else None
    )
    if message is None or status == httpx.codes.NOT_FOUND:
        return SpecError(f"got {url}, which answers {status} to /admin/advice; {A_GATEWAY}")
    if status in REFUSED:
        return SpecError(key_refusal(url, status, message, "--admin-key"))
    refusal = f"{url} answered {status}: {message}"
    return CommandError(refusal) if httpx.codes.is_server_error(status) else SpecError(refusal)
