"""Paths that a command writes to, as the command line gives them: a slash at the end names a
folder, whether it exists or not. Folders are made; for one that only a file's path names, that is
said.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryFile

from kendall.policies.text import SpecError
from kendall.queueing.errors import CommandError

log = logging.getLogger("kendall")


class Folder(type(Path())):  # type: ignore[misc] # PosixPath
    """A path that was written with a slash at its end."""


@dataclass(frozen=True, slots=True)
class FileToWrite:
    """The type of an option that takes a file. Raises SpecError for a folder or where none can
    be made, before anything is measured.
    """

    example: str
    tried: bool = True  # False where the command tries it later

    def __call__(self, value: str | Path) -> Path:
        """The file."""
        if is_folder(value):
            raise SpecError(
                f"got the folder {value}; expected a file, for example {Path(value) / self.example}"
            )
        if self.tried:
            check_writable(Path(value))
        return Path(value)

    @property
    def __name__(self) -> str:
        """For the help."""
        return "path"


def check_distinct(files: Mapping[str, Path | None]) -> None:
    """By option. Raises SpecError where two are one file."""
    given = [(flag, path) for flag, path in files.items() if path is not None]
    for number, (flag, path) in enumerate(given):
        for other, before in given[:number]:
            if path.resolve() == before.resolve():
                raise SpecError(f"got {other} and {flag} with {path}; expected two files")


def cannot_write(path: Path | str, error: OSError) -> str:
    """One line."""
    return f"cannot write {path}: {error.strerror or error}"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """The body writes this file. Raises CommandError, which names it, in place of an OSError,
    which does not where a disk is full.
    """
    try:
        yield
    except OSError as error:
        raise CommandError(cannot_write(path, error)) from None


def check_writable(path: Path, option: str = "", written: Path | None = None) -> None:
    """Leaves no file behind. Raises SpecError where the file could not be written.

    An existing one is opened; for a new one the nearest folder is tried. `option`: what named the
    path, for the message; `written`: the file that is written first and then takes the path's
    place.
    """
    probe = written or path
    try:
        if probe.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if probe.is_file():
            probe.open("ab").close()
        elif not probe.exists():  # neither a device nor a pipe, whose reader may come later
            check_folder(probe.parent)
            tell_missing_folder(path)
    except OSError as error:
        told = f"{option} {path}".lstrip()
        raise SpecError(
            f"got {told}; expected a file that can be written ({error.strerror})"
        ) from None


def check_folder(folder: Path) -> None:
    """Raises OSError where nothing can be written into it, or it cannot be made."""
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    with TemporaryFile(dir=there):
        pass


def tell_missing_folder(file: Path) -> None:
    """Its folder will be made, where it is not there: the name may be mistyped."""
    if not file.parent.exists():
        log.warning("the folder %s does not exist; it will be made for %s", file.parent, file.name)


def put_aside(path: Path) -> Path:
    """Rename a file by the time of its last change; its new name. Raises OSError."""
    changed = datetime.fromtimestamp(path.stat().st_mtime, UTC)
    kept = path.with_name(f"{path.name}.{changed:%Y%m%dT%H%M%S.%fZ}")
    path.rename(kept)
    return kept


def file_or_folder(value: str | Path) -> Path:
    """The type of an option that takes either."""
    return Folder(value) if is_folder(value) else Path(value)


def is_folder(value: str | Path) -> bool:
    """Whether a folder is meant."""
    return str(value).endswith(("/", os.sep)) or isinstance(value, Folder) or Path(value).is_dir()


def folder_to_write(value: str | Path) -> Path:
    """The type of an option that takes a folder. Raises SpecError for a file, or where nothing
    can be written.
    """
    if Path(value).is_file():
        raise SpecError(
            f"got the file {value}; expected a folder, which is created if it does not exist"
        )
    try:
        check_folder(Path(value))
    except OSError as error:
        raise SpecError(
            f"got the folder {value}; expected a folder that can be written to ({error.strerror})"
        ) from None
    return Path(value)
