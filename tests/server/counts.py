"""What a chaos test counted, as one line of JSON on its standard output: `pytest -rP` shows it."""

from __future__ import annotations

import json
import sys
from typing import Any


def tell(what: str, **counts: Any) -> None:
    """One line."""
    sys.stdout.write(json.dumps({"chaos": what, **counts}, default=str) + "\n")
