"""The command `kendall`: each subcommand is a thin call into a package, imported only when it is used.

Exit status: 0 done, 1 failed, 2 wrong arguments, 3 a check failed or no stable choice exists.
"""

from __future__ import annotations

import os
import sys

COMMANDS = {
    "demo": ("loadgen.demo_cli", "observed beside predicted, on the real engine, in a few minutes"),
    "serve": ("server.cli", "serve an OpenAI-style endpoint with a queue under a policy you choose"),
    "load": ("loadgen.load_cli", "send open-loop load and report what was seen"),
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
USAGE = """Usage: kendall COMMAND [OPTIONS]

  A live batching gateway for LLM inference that knows its own queueing theory.

Commands:
{commands}

`kendall COMMAND --help` explains one; `kendall --version` says which Kendall this is.
Every option can also be set as KENDALL_<OPTION> in the environment."""


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
        return int(_command(name).main(arguments, prog_name=f"kendall {name}", standalone_mode=False) or 0)
    except SpecError as error:
        return _complain(str(error), 2)
    except TyperException as error:
        return _complain(" ".join(error.format_message().split()), 2)
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
        if parameter.param_type_name == "option" and parameter.envvar is None and parameter.name != "help":
            parameter.envvar = f"KENDALL_{parameter.name.upper()}"
    return command


def _complain(message: str, status: int) -> int:
    print(f"kendall: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    main()
