"""Shell completion of `kendall`: names of commands without importing them, options of one
command by importing only it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from typer.core import TyperGroup

VARIABLE = "_KENDALL_COMPLETE"  # the scripts of typer set it and read the answer from stdout
SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")
ROOT_OPTIONS = {
    "--help": "Show the list of commands.",
    "--version": "Show the version.",
    "--install-completion": "Install completion for a shell.",
    "--show-completion": "Print the script that --install-completion installs.",
}


class Root(TyperGroup):
    """The commands as a typer group that builds a command when it is asked for it."""

    def __init__(self, abouts: Mapping[str, str], command: Callable[[str], Any]) -> None:
        super().__init__(name="kendall", add_help_option=False)
        self._abouts, self._command = dict(abouts), command

    def list_commands(self, ctx: Any) -> list[str]:
        del ctx
        return [*self._abouts, "help"]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The typer command of that name; behind `help` stand the names again."""
        del ctx
        if cmd_name == "help":
            return Root(self._abouts, self._command)
        return self._command(cmd_name) if cmd_name in self._abouts else None

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Commands, or the options of `kendall` itself."""
        del ctx
        from typer.core import CompletionItem  # type: ignore[attr-defined]

        known = (
            ROOT_OPTIONS
            if incomplete.startswith("-")
            else self._abouts | {"help": "Show the help of a command."}
        )
        return [
            CompletionItem(name, help=about)
            for name, about in known.items()
            if name.startswith(incomplete)
        ]


def answer(root: Root) -> int | None:
    """Print what a shell asks for and return the exit status; None where no shell asks."""
    from typer.completion import completion_init, shell_complete  # type: ignore[attr-defined]

    instruction = os.environ.get(VARIABLE)
    if not instruction:
        return None
    completion_init()
    return int(shell_complete(root, {}, "kendall", VARIABLE, instruction))


def set_up(flag: str, shell: str | None) -> int:
    """`--install-completion [SHELL]` and `--show-completion [SHELL]`.

    Raises SpecError: no such shell, or none detected; CommandError: nothing can be written for it.
    """
    from typer.completion import _get_shell_name, get_completion_script, install  # type: ignore[attr-defined]

    from kendall.policies.text import SpecError, suggest
    from kendall.queueing.errors import CommandError
    from kendall.queueing.measurement.paths import cannot_write

    shell = shell or _get_shell_name()
    if shell not in SHELLS:
        got = f"shell {shell!r}" if shell else "a shell that cannot be detected"
        raise SpecError(
            f"got {got}; expected {flag} {' | '.join(SHELLS)}{suggest(shell or '', SHELLS)}"
        )
    if flag == "--show-completion":
        print(get_completion_script(prog_name="kendall", complete_var=VARIABLE, shell=shell))
        return 0
    try:
        path = Path(install(shell=shell, prog_name="kendall", complete_var=VARIABLE)[1])
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        match error:
            case OSError() if error.filename == shell:  # PowerShell is asked where its profile lies
                failed = f"cannot run {shell}: {error.strerror}"
            case OSError():
                failed = cannot_write(error.filename, error)
            case _:
                failed = f"cannot install completion: {str(error).rstrip('.')}"
        raise CommandError(
            f"{failed}; `kendall --show-completion {shell}` prints the script"
        ) from None
    print(f"completion for {shell} is installed in {path}; it works in the next terminal")
    return 0
