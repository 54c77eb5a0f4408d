"""Client libraries as their users call them, on the real engine: tools and typed answers. The tiny
model is random: a grammar forces what it calls.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.libraries import CALLS
from tests.server.front.tooled import CITIES, DAYS, END, Served, serving

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def served(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("clients")
    with serving(folder, "--policy", "continuous:max_batch_size=4") as it:
        yield it


@pytest.mark.parametrize("library", CALLS)
def test_a_client_library_gets_its_tool_call(served: Served, programs: Path, library: str) -> None:
    bias = json.dumps({token: int(value) for token, value in END.items()})
    script = str(Path(__file__).with_name("libraries.py"))
    done = subprocess.run(
        [str(programs / "python"), script, library, served.process.url, bias],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == {"city", "days"}
    assert found["city"] in CITIES
    assert found["days"] in DAYS
