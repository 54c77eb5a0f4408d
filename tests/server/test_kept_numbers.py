"""A constant or default that changes, changes on purpose: `WRITE_GOLDEN=1 pytest FILE`."""

from __future__ import annotations

from tests.golden_files import is_as_kept
from tests.kept_numbers import numbers_of

PACKAGES = ("server.queue", "server.admission", "server.security", "server.supervision")


def test_constants_and_defaults_are_as_kept() -> None:
    assert is_as_kept("numbers/server.txt", numbers_of(*PACKAGES))
