"""Paths that a command writes to, as the command line gives them: a slash at the end names a folder, whether it exists or not."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

from policies.text import SpecError


class Folder(type(Path())):  # type: ignore[misc] # PosixPath
    """A path that was written with a slash at its end."""


@dataclass(frozen=True, slots=True)
class FileToWrite:
    """The type of an option that takes a file. Raises SpecError for a folder or where none can be made, before anything is measured."""

    example: str
    tried: bool = True  # False where the command tries it later

    def __call__(self, value: str | Path) -> Path:
        """The file."""
        if is_folder(value):
            raise SpecError(f"got the folder {value}; expected a file, for example {Path(value) / self.example}")
        if self.tried:
            check_writable(Path(value))
        return Path(value)

    @property
    def __name__(self) -> str:
        """For the help."""
        return "path"


def check_writable(path: Path) -> None:
    """Raises SpecError where the file could not be written: an existing one is opened, for a new one the nearest folder is tried."""
    try:
        if path.exists():
            if path.is_file():
                path.open("ab").close()
            return
        folder = next(each for each in path.absolute().parents if each.exists())
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        told = f"got {path}, which cannot be written: {error.strerror}; expected a file in a folder that can be written to"
        raise SpecError(told) from None


def file_or_folder(value: str | Path) -> Path:
    """The type of an option that takes either."""
    return Folder(value) if is_folder(value) else Path(value)


def is_folder(value: str | Path) -> bool:
    """Whether a folder is meant."""
    return str(value).endswith(("/", os.sep)) or isinstance(value, Folder) or Path(value).is_dir()


def folder_to_write(value: str | Path) -> Path:
    """The type of an option that takes a folder. Raises SpecError for a file."""
    if Path(value).is_file():
        raise SpecError(f"got the file {value}; expected a folder, which is made if it does not exist")
    return Path(value)
