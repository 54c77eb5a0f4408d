"""The command `kendall`: each subcommand is a thin call into a package, imported only when it is used.

Exit status: 0 done, 1 failed, 2 wrong arguments, 3 a check failed or no stable choice exists.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any

COMMANDS = {
    "demo": ("loadgen.demo_cli", "observed beside predicted, on the real engine, in a few minutes"),
    "serve": ("server.cli", "serve an OpenAI-style endpoint with a queue under a policy you choose"),
    "load": ("loadgen.load_cli", "send open-loop load and report what was seen"),
    "summary": ("loadgen.summary_cli", "print the report of a saved load run, also of one that was killed"),
    "sweep": ("loadgen.sweep_cli", "measure policies x loads x token limits, resumable, with a report"),
    "compare": ("loadgen.compare_cli", "put a run's observed queueing delay beside theory"),
    "audit": ("loadgen.audit_cli", "are the arrivals of a run what they are said to be?"),
    "calibrate": ("server.cli", "measure the latency law of an engine"),
    "predict": ("queueing.cli", "predict the queueing delay of a policy"),
    "simulate": ("queueing.cli", "simulate a policy on Poisson arrivals"),
    "optimize": ("queueing.optimize_cli", "choose a token limit, batch size, policy, servers or rate by prediction"),
    "advise": ("server.advising", "ask a running gateway what its model would change"),
    "reproduce": ("queueing.reproduction.cli", "the papers' tables and figures, computed again and compared"),
}
NO_OPTIONS = frozenset(
    {"KENDALL_DEBUG", "KENDALL_ENGINE_CPUS", "KENDALL_ENGINE_ERROR_FILE", "KENDALL_FLAVOUR", "KENDALL_GATEWAY_PID"}
)  # variables of the same prefix
# options whose name another command has for something else: only KENDALL_<COMMAND>_<OPTION> sets them
OTHER_MEANING = {
    "calibrate": {"prompt-tokens", "output"},  # a number, elsewhere a distribution; a file
    "load": {"model", "output"},  # as clients name it, where `serve` takes a folder too; a run file
    "reproduce": {"output"},  # a folder
    "sweep": {"max-output-tokens", "slo"},  # lists to search over
}
USAGE = """Usage: kendall COMMAND [OPTIONS]

  A live batching gateway for LLM inference that knows its own queueing theory.

Commands:
{commands}

`kendall COMMAND --help` explains one; `kendall --version` says which Kendall this is.
Every option can also be set as KENDALL_<OPTION> in the environment, or as KENDALL_<COMMAND>_<OPTION> for one command only."""


def main(arguments: list[str] | None = None) -> None:
    """Run one command; errors are one line on stderr."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE.format(commands="\n".join(f"  {name:<10} {text}" for name, (_, text) in COMMANDS.items())))
        sys.exit(0 if arguments else 2)
    if arguments[0] == "--version":
        from importlib.metadata import version

        print(f"kendall {version('kendall')}")
        sys.exit(0)
    sys.exit(_run(arguments[0], arguments[1:]))


def _run(name: str, arguments: list[str]) -> int:
    from policies.text import SpecError, suggest

    if name not in COMMANDS:
        return _complain(f"unknown command {name!r}; expected one of {', '.join(COMMANDS)}{suggest(name, COMMANDS)}", 2)
    from typer.exceptions import Abort, Exit, TyperException

    try:
        command = _command(name)
        _check_environment(name, command, arguments)
        _check_one_key(name, command, arguments)
        return int(command.main(arguments, prog_name=f"kendall {name}", standalone_mode=False) or 0)
    except SpecError as error:
        return _complain(f"{error}{_origin(str(error), name, arguments)}", 2)
    except TyperException as error:
        return _complain(_told(error), 2)
    except Exit as stop:
        return stop.exit_code
    except (Abort, KeyboardInterrupt):
        return 130
    except Exception as error:
        if os.environ.get("KENDALL_DEBUG"):
            raise
        return _complain(f"{type(error).__name__}: {error} (KENDALL_DEBUG=1 shows where)", 1)


def _command(name: str):  # type: ignore[no-untyped-def]
    """The typer command, its options given environment twins."""
    import importlib

    import typer.main

    command = typer.main.get_command(importlib.import_module(COMMANDS[name][0]).app)
    command = getattr(command, "commands", {name: command})[name]
    for parameter in command.params:
        if parameter.param_type_name == "option" or parameter.envvar:
            own, *shared = _twins(name, parameter)
            parameter.envvar = own if own in os.environ or not shared else shared[0]
    return command


def _twins(name: str, parameter: Any) -> list[str]:
    """KENDALL_<COMMAND>_<OPTION>, then KENDALL_<OPTION>, the one for all commands in which it means the same."""
    flag = next((opt for opt in parameter.opts if opt.startswith("--")), parameter.name).removeprefix("--")
    own, shared = (f"KENDALL_{text}".replace("-", "_").upper() for text in (f"{name}_{flag}", flag))
    return [own] if flag in OTHER_MEANING.get(name, ()) else [own, shared]


def _origin(message: str, name: str, arguments: list[str]) -> str:
    """Which variable set the option that a message complains of; nothing where a flag did."""
    named = re.findall(r"(?<![\w-])--[a-z][a-z-]*", message)
    for parameter in _command(name).params:
        if (parameter.envvar or "") in os.environ and not _is_flag_of(parameter, arguments) and _is_flag_of(parameter, named):
            return f" ({parameter.opts[0]} came from {parameter.envvar})"
    return ""


def _is_flag_of(parameter: Any, arguments: list[str]) -> bool:
    return any(argument.partition("=")[0] in parameter.opts for argument in arguments)


def _check_environment(name: str, command: Any, arguments: list[str]) -> None:
    """Raises SpecError: a variable KENDALL_... that no command reads, which is a typing error or a setting that is gone."""
    from policies.text import SpecError, suggest

    for variable in [variable for variable, value in os.environ.items() if _is_service_link(variable, value)]:
        del os.environ[variable]
    ours = _read_by(name, command)
    strange = [variable for variable in os.environ if variable.startswith("KENDALL_") and variable not in ours]
    if not strange or "--help" in arguments:
        return
    known = ours.union(*(_read_by(other, _command(other)) for other in COMMANDS))  # imports them all
    for variable in strange:
        if variable not in known:
            raise SpecError(f"got {variable} in the environment; expected the name of an option{suggest(variable, tuple(known))}")


def _check_one_key(name: str, command: Any, arguments: list[str]) -> None:
    """Raises SpecError: `serve` takes several keys from one variable, a client sends one."""
    from policies.text import SpecError

    for parameter in command.params:
        if parameter.name not in ("api_key", "admin_key") or parameter.multiple or _is_flag_of(parameter, arguments):
            continue
        if len(os.environ.get(parameter.envvar, "").split()) > 1:
            own = _twins(name, parameter)[0]
            raise SpecError(f"got several keys in {parameter.envvar}; expected one to send: set {own} too")


def _read_by(name: str, command: Any) -> frozenset[str]:
    return NO_OPTIONS.union(*(_twins(name, parameter) for parameter in command.params if parameter.envvar))


def _is_service_link(variable: str, value: str) -> bool:
    """Whether Kubernetes set it, for a service whose name begins with kendall: KENDALL_PORT=tcp://10.0.0.1:8080."""
    if not variable.startswith("KENDALL_"):
        return False
    if variable.endswith("_PORT") and value.startswith(("tcp://", "udp://", "sctp://")):
        return True
    return re.search(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$", variable) is not None


def _told(error: Any) -> str:
    """What typer says is wrong, in one line, and where the value came from if not from the command line."""
    message = " ".join(error.format_message().split())
    parameter, context = getattr(error, "param", None), getattr(error, "ctx", None)
    if parameter is None or context is None:
        return message
    source = context.get_parameter_source(parameter.name)
    if source is not None and source.name == "ENVIRONMENT":
        return f"{message}; got {os.environ.get(parameter.envvar)!r:.80} from {parameter.envvar}"
    if source is not None and source.name == "DEFAULT_MAP":
        return f"{message}; got {context.default_map[parameter.name]!r:.80} from {context.params.get('config')}"
    return message


def _complain(message: str, status: int) -> int:
    print(f"kendall: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    main()
