"""The public surface as sorted lines, to be compared with another revision's by `diff`:
`python -m tests.public_surface`.

Flags with their variables and defaults, the OpenAPI document, metrics, the keys of the JSON that
the administrative routes answer, the fields of a record, the Python API.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import kendall
from tests.virtual_time import run_virtual

READ = ("/admin/state", "/admin/prediction", "/admin/policy", "/admin/servers", "/admin/calibrate")


def module(name: str) -> Any:
    """Import a module of the product, which earlier revisions have at the top level."""
    try:
        return importlib.import_module(f"kendall.{name}")
    except ModuleNotFoundError:
        return importlib.import_module(name)


def flags() -> Iterator[str]:
    """Each parameter of each command."""
    cli = importlib.import_module("kendall.cli")
    command_of = getattr(cli, "command_of", None) or cli._command  # in earlier revisions
    for name in cli.COMMANDS:
        for each in command_of(name).params:
            names = " ".join(sorted((*each.opts, *each.secondary_opts)))
            yield (
                f"kendall {name} {names}: {each.metavar}, default {each.default!r}, "
                f"{each.envvar}, {'required' if each.required else 'optional'}"
            )


def keys(value: Any, path: str = "") -> Iterator[str]:
    """The paths of all values of a JSON document; entries of a list are one."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from keys(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for inner in value:
            yield from keys(inner, f"{path}[]")
    else:
        yield path


def leaves(value: Any, path: str = "") -> Iterator[str]:
    """The paths of all values with the values; entries of a list are numbered."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from leaves(inner, f"{path}[{number}]")
    else:
        yield f"{path} = {value!r}"


def served() -> list[str]:
    """The OpenAPI document, the keys of READ and the metrics of a gateway after some calls, on
    virtual time.
    """
    asgi = importlib.import_module("tests.server.asgi")

    async def ask() -> list[str]:
        lines: list[str] = []
        async with asgi.running(
            "capped:max_batch_size=4", prediction_interval=5, what_if_interval=10
        ) as (app, _):
            for _ in range(300):
                made = asgi.Call(app, "POST", "/v1/completions", asgi.completion(max_tokens=4))
                await asyncio.sleep(0.1)
                await made.task
            await asyncio.sleep(15)
            document = (await asgi.call(app, "GET", "/openapi.json")).json()
            lines += [f"openapi {line}" for line in leaves(document)]
            for path in READ:
                answer = (await asgi.call(app, "GET", path)).json()
                lines += [f"GET {path} {key}" for key in keys(answer)]
            metrics = (await asgi.call(app, "GET", "/metrics")).body.decode()
            lines += re.findall(r"^# (?:HELP|TYPE) kendall_.*", metrics, re.MULTILINE)
        return lines

    found: list[str] = run_virtual(ask())
    return found


def python() -> Iterator[str]:
    """Names of `import kendall`, with their signatures and fields."""
    for name in kendall.__all__:
        value = getattr(kendall, name)
        annotated = getattr(value, "__annotations__", {})
        yield f"kendall.{name} {inspect.signature(value) if inspect.isfunction(value) else ''}"
        for field, of in annotated.items():
            yield f"kendall.{name}.{field}: {getattr(of, '__forward_arg__', of)}"


def lines() -> Iterator[str]:
    """All of it."""
    yield from flags()
    yield from served()
    yield from python()
    record = module("queueing.measurement.record").Record
    yield from (f"record {name}" for name in record.__struct_fields__)
    errors = module("policies.registry")
    yield from (f"policy {json.dumps(name)}" for name in errors.usable_policies())


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in sorted(set(lines())))
