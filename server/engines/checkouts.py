"""Model folders that Kendall makes itself, in the user's cache: a folder is there whole or not at
all.

A folder is made under another name, by one process at a time, written out to the disk, and renamed.
What a killed process has left is made anew by the next one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kendall.queueing.errors import CommandError

WEIGHTS, TOKENIZER = "model.safetensors", "tokenizer.json"
JSON_FILES = ("config.json", "generation_config.json", "tokenizer_config.json")
FILES = (*JSON_FILES, TOKENIZER, WEIGHTS)
Bfloat16 = npt.NDArray[np.uint16]  # bit patterns: numpy has no such type
log = logging.getLogger("kendall.engine")


def models_home(model: str) -> Path:
    """Where model folders are: the user's cache. Raises CommandError: a user without a home."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        raise CommandError(
            f"got no home folder for the model `{model}`; expected one: set XDG_CACHE_HOME to a "
            "folder"
        ) from None
    return cache / "kendall" / "models"


def is_whole(folder: Path) -> bool:
    """Whether every file of the model is there."""
    return all((folder / name).is_file() for name in FILES)


def make_folder(folder: Path, model: str, write: Callable[[Path], None]) -> Path:
    """Have `write` fill the folder if it is not there yet, and return it. Safe beside others who
    do the same.

    Raises CommandError where it cannot be written, and what `write` raises.
    """
    try:
        if not is_whole(folder):
            _make(folder, model, write)
    except OSError as error:
        expected = (
            f"a folder that can be written to ({error.strerror or error}): set "
            "XDG_CACHE_HOME to another one"
        )
        raise CommandError(
            f"got {folder.parent} for the model `{model}`; expected {expected}"
        ) from None
    return folder


def _make(folder: Path, model: str, write: Callable[[Path], None]) -> None:
    building = folder.parent / f".{folder.name}.part"
    with _alone_in(building, model):
        if is_whole(folder):  # another process was first
            building.rmdir()
            return
        try:
            write(building)
            for path in building.iterdir():
                with path.open("rb") as file:
                    os.fsync(file.fileno())  # a rename may reach the disk before what it names
            building.chmod(0o755)  # for another user of a container, whatever the umask
            shutil.rmtree(folder, ignore_errors=True)  # one that lost a file
            building.rename(folder)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise


@contextlib.contextmanager
def _alone_in(building: Path, model: str) -> Iterator[None]:
    """Make the folder, empty, and hold the lock on it, which a killed process loses."""
    building.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with contextlib.suppress(FileExistsError):
            building.mkdir()
        with _locked(building, model) as mine:
            if mine:
                for left in building.iterdir():
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
                yield
                return


@contextlib.contextmanager
def _locked(folder: Path, model: str) -> Iterator[bool]:
    """Whether the lock is on what is there under that name: the process that held it may have
    renamed or removed the folder.
    """
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        yield False
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("the model `%s` is being made by another process: waiting for it", model)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield _is_at(handle, folder)
    finally:
        os.close(handle)


def _is_at(handle: int, folder: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), folder.stat())
    except FileNotFoundError:
        return False


def write_json(folder: Path, contents: Mapping[str, Mapping[str, Any]]) -> None:
    """The files of JSON_FILES."""
    for name in JSON_FILES:
        text = json.dumps(contents[name], indent=1) + "\n"
        (folder / name).write_text(text, encoding="utf-8")


def write_weights(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[Bfloat16]
) -> None:
    """The safetensors format: length of the header (8 bytes, little-endian), JSON header, data in
    the header's order. One tensor is in memory at a time.

    By hand because the base installation, which has no vLLM, has no safetensors either.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / WEIGHTS).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            file.write(tensor.astype("<u2", copy=False).tobytes())
