"""The command `kendall`: each subcommand is a thin call into a package, imported only when it is
used.

Exit status: 0 success, 1 failure, 2 invalid arguments (also a key that a server refuses), 3 a check
failed or no stable choice exists. Every error is a line that begins with `kendall:`.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

COMMANDS = {
    "demo": (
        "kendall.loadgen.commands.demo_cli",
        "measure an engine under every policy and compare with predictions",
    ),
    "serve": (
        "kendall.server.operations.cli",
        "serve an OpenAI-compatible endpoint with a queue and a policy",
    ),
    "load": (
        "kendall.loadgen.commands.load_cli",
        "send open-loop load and report the delays that clients see",
    ),
    "summary": (
        "kendall.loadgen.commands.summary_cli",
        "print the report of a saved load run, complete or interrupted",
    ),
    "sweep": (
        "kendall.loadgen.commands.sweep_cli",
        "measure policies x loads x token limits; resumable, with a report",
    ),
    "compare": (
        "kendall.loadgen.commands.compare_cli",
        "compare the observed queueing delay of a run with predictions",
    ),
    "audit": (
        "kendall.loadgen.commands.audit_cli",
        "test whether the arrivals of a run follow the requested process",
    ),
    "calibrate": (
        "kendall.server.operations.calibrate_cli",
        "measure the latency law of an engine",
    ),
    "predict": ("kendall.queueing.commands.cli", "predict the queueing delay of a policy"),
    "simulate": ("kendall.queueing.commands.cli", "simulate a policy on Poisson arrivals"),
    "check-policy": (
        "kendall.queueing.commands.check_policy_cli",
        "check a policy of your own, or list all policies",
    ),
    "policies": (
        "kendall.queueing.commands.policies_cli",
        "list the policies and orders, built in and your own",
    ),
    "profiles": (
        "kendall.queueing.commands.profiles_cli",
        "list the latency profiles that a name stands for",
    ),
    "optimize": (
        "kendall.queueing.commands.optimize_cli",
        "choose a token limit, batch size, policy, number of servers or rate",
    ),
    "plan": (
        "kendall.queueing.commands.plan_cli",
        "plan capacity: the fewest servers that keep an SLO, and their cost",
    ),
    "advise": (
        "kendall.server.operations.advise_cli",
        "ask a running gateway which settings its model recommends",
    ),
    "watch": (
        "kendall.server.watch.cli",
        "watch servers that run already: observed delays beside predicted ones",
    ),
    "reproduce": (
        "papers.command",
        "recompute the papers' tables and figures and compare",
    ),
}
# of `kendall` itself
OPTIONS = (
    "--help",
    "--version",
    "--install-completion",
    "--show-completion",
)
# variables of the same prefix
NO_OPTIONS = frozenset(
    {
        "KENDALL_DEBUG",
        "KENDALL_ENGINE_CPUS",
        "KENDALL_ENGINE_ERROR_FILE",
        "KENDALL_FLAVOUR",
        "KENDALL_GATEWAY_PID",
    }
)
# Kubernetes sets such variables for a service whose name begins with kendall, and
# KENDALL_PORT=tcp://10.0.0.1:8080
SERVICE_LINK = re.compile(
    r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$"
)
# options whose name another command has for something else: only KENDALL_<COMMAND>_<OPTION> sets
# them
OTHER_MEANING = {
    "calibrate": {"prompt-tokens", "output"},  # a number, elsewhere a distribution; a file
    "compare": {"output"},  # files
    "demo": {"output"},  # a folder
    # as clients name it, where `serve` takes a folder too; a run file; what a run is judged by
    "load": {"model", "output", "slo"},
    "summary": {"slo"},  # as for load
    "plan": {"max-num-seqs", "max-output-tokens", "latency"},  # lists to choose from
    "reproduce": {"output"},  # a folder
    "watch": {"output", "slo"},  # a page; of servers that are not this machine's gateway
    "sweep": {"max-output-tokens", "slo", "output"},  # lists to search over; a folder
}
USAGE = """Usage: kendall COMMAND [OPTIONS]

  A live batching gateway for LLM inference that knows its own queueing theory.

Commands:
{commands}

`kendall COMMAND --help` explains a command, and so does `kendall help COMMAND`.
`kendall --version` or -V prints the version.
`kendall --install-completion` installs shell completion;
`kendall --show-completion` prints the script.
Environment variables also set options: KENDALL_<OPTION>,
or KENDALL_<COMMAND>_<OPTION> for one command."""


def main(arguments: list[str] | None = None) -> None:
    """Run one command; errors are one line on stderr."""
    from kendall import output

    output.watch()
    try:
        status = _status(sys.argv[1:] if arguments is None else arguments)
        output.flush()
    except OSError as error:
        if output.failure() is None or os.environ.get("KENDALL_DEBUG"):
            raise
        output.discard()  # whoever has closed the pipe, such as `head`, wants no message
        status = (
            1
            if isinstance(error, BrokenPipeError)
            else _complain(f"cannot write to stdout: {error.strerror}", 1)
        )
    boot = sys.modules.get("kendall.server.engines.vllm.boot")
    if boot is not None and boot.left_behind():
        # a thread is in the middle of starting or ending vLLM: tidying up could abort the process
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _status(arguments: list[str]) -> int:
    if os.environ.get("_KENDALL_COMPLETE"):
        from kendall.completion import Root, answer

        return answer(Root({name: about for name, (_, about) in COMMANDS.items()}, command_of)) or 0
    match arguments:
        case []:
            _print_usage()
            return 2
        case ["-h" | "--help" | "help", "-V" | "--version", *_]:
            return _status(arguments[1:])
        case ["-h" | "--help" | "help", *names]:
            return _help([name for name in names if name not in ("-h", "--help")])
        case ["-V" | "--version", *_]:
            from importlib.metadata import version

            print(f"kendall {version('kendall')}")
            return 0
        case ["--install-completion" | "--show-completion" as flag, *rest]:
            return _set_up_completion(flag, rest[0] if rest else None)
        case _:
            return run_command(arguments[0], arguments[1:])


def _help(names: list[str]) -> int:
    """Print the usage of `kendall` or the help of one command."""
    if not names or names[0] in ("help", *OPTIONS):
        _print_usage()
        return 0
    name, *more = names
    if more:
        return _complain(
            f"got {' '.join(more)!r:.80} too many; expected one command, as in `kendall help "
            f"{name}`",
            2,
        )
    return run_command(name, ["--help"])


def _print_usage() -> None:
    """Print the usage as wide as the terminal, with a line of its own for each command where that
    has the room.
    """
    from kendall.queueing.commands.terminal import console, say

    to = console()
    names = {f"  {name} " for name in COMMANDS}
    for line in USAGE.format(
        commands="\n".join(f"  {name:<12} {text}" for name, (_, text) in COMMANDS.items())
    ).split("\n"):
        say(to, line, hang=15 if any(map(line.startswith, names)) else 2)


def _set_up_completion(flag: str, shell: str | None) -> int:
    from kendall.completion import set_up
    from kendall.policies.text import SpecError
    from kendall.queueing.errors import CommandError

    try:
        return set_up(flag, shell)
    except SpecError as error:
        return _complain(str(error), 2)
    except CommandError as error:
        return _complain(str(error), 1)


def run_command(name: str, arguments: list[str]) -> int:
    """Run one subcommand; its exit status."""
    from kendall.policies.text import suggest

    if name.startswith("-"):
        near = suggest(name, OPTIONS).replace("'", "")
        return _complain(f"got {name}; expected a command or one of {', '.join(OPTIONS)}{near}", 2)
    if name not in COMMANDS:
        return _complain(
            f"got command {name!r}; expected one of {', '.join(COMMANDS)}{suggest(name, COMMANDS)}",
            2,
        )
    from typer.exceptions import Exit

    try:
        with _hangups_ignored(name):
            command = command_of(name)
            _check_environment(name, command, arguments)
            _check_one_key(name, command, arguments)
            again = tuple(arguments)  # a gateway reads its options again on SIGHUP
            called = f"kendall {name}"
            return int(
                command.main(arguments, prog_name=called, standalone_mode=False, obj=again) or 0
            )
    except Exit as stop:
        return stop.exit_code
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # noqa: BLE001 - `_failed` raises it again under KENDALL_DEBUG
        return _failed(error, name, arguments)


@contextlib.contextmanager
def _hangups_ignored(name: str) -> Iterator[None]:
    """Within `kendall serve`: SIGHUP reloads what serves, and ends neither a gateway that is
    starting nor the processes that it starts, which inherit this.
    """
    ours = threading.current_thread() is threading.main_thread()
    if name != "serve" or not ours or not hasattr(signal, "SIGHUP"):
        yield
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def _failed(error: Exception, name: str, arguments: list[str]) -> int:
    """Print what went wrong and return the exit status."""
    from typer.exceptions import Abort, TyperException

    from kendall import output
    from kendall.complaints import one_line
    from kendall.policies.text import SpecError
    from kendall.queueing.errors import CommandError, PredictionError

    match error:
        case OSError() if output.failure() is not None:
            raise error  # to `main`
        case SpecError():
            return _complain(_as_typed(str(error), name, arguments), 2)
        case TyperException():
            return _complain(one_line(error, command_of(name), arguments), 2)
        case CommandError() | PredictionError():
            return _complain(str(error), 1)
        case Abort():
            return 130
        case _ if os.environ.get("KENDALL_DEBUG"):
            raise error
        case _:
            return _complain(f"{type(error).__name__}: {error} (KENDALL_DEBUG=1 shows where)", 1)


def _as_typed(message: str, name: str, arguments: list[str]) -> str:
    """`got --arrival-rate -1` for `got arrival_rate=-1`, and `set --patience` for `set
    patience`: names in Python; with the variable that set the option, where no flag did.
    """
    from kendall.policies.ordered import KEYS

    parameters = command_of(name).params
    flags = {
        parameter.name: parameter.opts[0]
        for parameter in parameters
        if parameter.opts[0].startswith("--") and parameter.name not in KEYS  # of policies
    }
    got, semicolon, expected = message.partition("; ")
    got = re.sub(
        r"'[^']*'|\b([a-z_]+)=(?=\S)",  # what is quoted was typed so
        lambda found: f"{flags[found[1]]} " if found[1] in flags else found[0],
        got,
    )
    expected = re.sub(
        r"\bset ([a-z_]+)\b", lambda found: f"set {flags.get(found[1], found[1])}", expected
    )
    message = got + semicolon + expected
    named = re.findall(r"(?<![\w-])--[a-z][a-z-]*", message)
    for parameter in parameters:
        if (
            (parameter.envvar or "") in os.environ
            and not _is_flag_of(parameter, arguments)
            and _is_flag_of(parameter, named)
        ):
            return f"{message} ({parameter.opts[0]} came from {parameter.envvar})"
    return message


def command_of(name: str):  # type: ignore[no-untyped-def]
    """The typer command; its options get environment variables, its help is shown as written."""
    import importlib.util

    import typer.main

    from kendall.examples import EXAMPLES
    from kendall.help import show_as_written
    from kendall.queueing.errors import CommandError
    from kendall.server.operations.configuration.file import key_of

    module = COMMANDS[name][0]
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        raise CommandError(
            f"got `kendall {name}` of an installed package; expected a clone of the repository, "
            "which alone has what the papers need: run it there"
        )
    command = typer.main.get_command(importlib.import_module(module).app)
    command = getattr(command, "commands", {name: command})[name]
    for parameter in command.params:
        if parameter.param_type_name == "option" or parameter.envvar:
            variables = variables_of(name, parameter)
            rule = _variable(key_of(parameter))
            parameter.envvar = next(
                (variable for variable in variables if variable in os.environ),
                rule if rule in variables else variables[0],
            )
            parameter.show_envvar = rule not in variables  # the help ends with the rule
    show_as_written(command, examples=EXAMPLES[name])
    return command


def variables_of(name: str, parameter: Any) -> list[str]:
    """KENDALL_<COMMAND>_<OPTION>, then KENDALL_<OPTION>, the one for all commands in which it
    means the same; of each of its names.
    """
    flags = [opt.removeprefix("--") for opt in parameter.opts if opt.startswith("--")] or [
        parameter.name
    ]
    shared = [flag for flag in flags if flag not in OTHER_MEANING.get(name, ())]
    return [*(_variable(f"{name}_{flag}") for flag in flags), *map(_variable, shared)]


def _variable(option: str) -> str:
    return f"KENDALL_{option}".replace("-", "_").upper()


def _is_flag_of(parameter: Any, arguments: list[str]) -> bool:
    return any(argument.partition("=")[0] in parameter.opts for argument in arguments)


def _check_environment(name: str, command: Any, arguments: list[str]) -> None:
    """Raises SpecError: a variable KENDALL_... that no command reads, which is a typing error or
    a setting that is gone.
    """
    from kendall.policies.text import SpecError

    for variable, value in list(os.environ.items()):
        address = variable.endswith("_PORT") and value.startswith(("tcp://", "udp://", "sctp://"))
        if variable.startswith("KENDALL_") and (address or SERVICE_LINK.search(variable)):
            del os.environ[variable]
    ours = _read_by(name, command)
    strange = [
        variable
        for variable in os.environ
        if variable.startswith("KENDALL_") and variable not in ours
    ]
    if not strange or "--help" in arguments:
        return
    # imports them all
    known = ours.union(*(_read_by(other, command_of(other)) for other in COMMANDS))
    for variable in strange:
        if variable not in known:
            near = _near_variable(variable, ours) or _near_variable(variable, known)
            raise SpecError(
                f"got {variable} in the environment; expected the name of an option{near}"
            )


def _near_variable(variable: str, known: frozenset[str]) -> str:
    """`"; did you mean 'KENDALL_POLICY'?"`; what all variables, or all of one command, begin
    with does not make two of them alike.
    """
    from kendall.policies.text import suggest

    prefix = next(
        (
            own
            for own in map(_variable, (f"{name}_" for name in COMMANDS))
            if variable.startswith(own)
        ),
        "KENDALL_",
    )
    rests = tuple(name.removeprefix(prefix) for name in sorted(known) if name.startswith(prefix))
    return suggest(variable.removeprefix(prefix), rests).replace("mean '", f"mean '{prefix}")


def _check_one_key(name: str, command: Any, arguments: list[str]) -> None:
    """Raises SpecError: `serve` takes several keys from one variable, a client sends one."""
    from kendall.policies.text import SpecError

    for parameter in command.params:
        if (
            parameter.name not in ("api_key", "admin_key")
            or parameter.multiple
            or _is_flag_of(parameter, arguments)
        ):
            continue
        if len(os.environ.get(parameter.envvar, "").split()) > 1:
            own = variables_of(name, parameter)[0]
            raise SpecError(
                f"got several keys in {parameter.envvar}; expected a single key to send: set "
                f"{own} too"
            )


def _read_by(name: str, command: Any) -> frozenset[str]:
    return NO_OPTIONS.union(
        *(variables_of(name, parameter) for parameter in command.params if parameter.envvar)
    )


def _complain(message: str, status: int) -> int:
    with contextlib.suppress(OSError):  # stderr may be full as well: the status still tells
        print(f"kendall: {message}", file=sys.stderr)
    return status
