"""Write grafana/dashboards/*.json, or with `--check` say which of them are not what the code
says (exit status 3).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from grafana import compared, engine, load_test, overview, theory

FOLDER = Path(__file__).parent / "dashboards"
BUILDERS: dict[str, Callable[[], Dashboard]] = {
    "kendall.json": overview.build,  # the home page that docker/compose.yaml names
    "kendall-theory.json": theory.build,
    "kendall-policies.json": compared.build,
    "kendall-engine.json": engine.build,
    "kendall-load.json": load_test.build,
}


def texts() -> dict[str, str]:
    """Every file's text by its name."""
    return {
        name: json.dumps(build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"
        for name, build in BUILDERS.items()
    }


def outdated() -> list[str]:
    """Files that differ, are missing, or that no code makes."""
    made, there = texts(), {path.name: path.read_text() for path in FOLDER.glob("*.json")}
    return sorted(name for name in made.keys() | there.keys() if made.get(name) != there.get(name))


def main(arguments: list[str]) -> int:
    """Exit status 0: the files are what the code says."""
    if arguments == ["--check"]:
        for name in (stale := outdated()):
            print(f"grafana/dashboards/{name} is not what the code says: run `make dashboards`")
        return 3 if stale else 0
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.glob("*.json"):
        path.unlink()
    for name, text in texts().items():
        (FOLDER / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
