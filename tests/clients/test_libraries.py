"""Client libraries as their users call them, against `kendall serve` on the real engine: whole
answers, streams, tools, exceptions and retries.

The tiny model is random: a grammar forces what it calls. Each kind of call has an API key of its
own, and a key has one call in `PERIOD` seconds.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from kendall.queueing.measurement.record import Record
from tests.clients.libraries import MESSAGES, TOKENS
from tests.clients.table import LIBRARIES, STATUSES
from tests.server.openai_tools.tooled import CITIES, DAYS, END, Served, serving

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]
KINDS = ("plain", "stream", "tools", "400", "401", "404", "limited")
PERIOD = 8.0  # seconds; no library waits as long of its own accord before its first retry
LATER = 3.0  # seconds that it may come after the instant that it was asked to wait for
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1"}


def key_of(library: str, kind: str) -> str:
    return f"the-key-of-{library}-{kind}"


@dataclass
class Gateway:
    """One that serves, and what each library printed of it."""

    served: Served
    printed: dict[str, dict[str, Any]] = field(default_factory=dict)

    def outcome(self, library: str, command: list[str]) -> dict[str, Any]:
        """Of each kind of call; the library runs once."""
        if library not in self.printed:
            keys = {kind: key_of(library, kind) for kind in KINDS}
            bias = {token: int(value) for token, value in END.items()}
            asked = {"url": self.served.process.url, "keys": keys, "bias": bias}
            done = subprocess.run(
                [*command, json.dumps(asked)],
                env=os.environ | OFFLINE,
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            assert done.returncode == 0, done.stderr[-3000:]
            self.printed[library] = json.loads(done.stdout.splitlines()[-1])
        return self.printed[library]

    def limited(self, library: str) -> list[Record]:
        """The records of the calls with this key, and of those refused between them: libraries
        run one after the other, and a refused call has no key in its record.
        """
        key = hashlib.sha256(key_of(library, "limited").encode()).hexdigest()[:8]
        records = sorted(self.served.records(), key=lambda record: record.arrived_at or 0)
        places = [place for place, record in enumerate(records) if record.flow == key]
        return records[places[0] : places[-1] + 1]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("clients")
    keys = [key_of(library, kind) for library in LIBRARIES for kind in KINDS if kind != "401"]
    file = folder / "keys"
    file.write_text("\n".join([*keys, key_of("none", "plain")]), encoding="utf-8")
    file.chmod(0o600)
    limits = ("--rate-limit", str(1 / PERIOD), "--rate-limit-burst", str(PERIOD))
    policy = ("--policy", "continuous:max_batch_size=4")
    with serving(folder, *policy, *limits, "--api-key-file", str(file)) as served:
        yield Gateway(served)


@pytest.fixture(scope="module")
def text(gateway: Gateway) -> str:
    """The answer without a library."""
    answer = httpx.post(
        f"{gateway.served.process.url}/v1/chat/completions",
        json={"model": "tiny", "messages": MESSAGES, "max_tokens": TOKENS, "temperature": 0},
        headers={"authorization": f"Bearer {key_of('none', 'plain')}"},
        timeout=60,
    )
    return str(answer.json()["choices"][0]["message"]["content"])


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def outcome(gateway: Gateway, library: str, request: pytest.FixtureRequest) -> dict[str, Any]:
    """What came of each kind of call with the library. Only its own environment has to be there."""
    here = Path(__file__).parent
    if library == "openai-node":
        command = [request.getfixturevalue("node"), str(here / "node" / "openai.mjs")]
    else:
        own = "llama_index_programs" if library == "llama-index" else "programs"
        python = str(request.getfixturevalue(own) / "python")
        command = [python, str(here / "libraries.py"), library]
    return gateway.outcome(library, command)


def answer_of(result: dict[str, Any]) -> Any:
    assert "answer" in result, result
    return result["answer"]


def test_a_whole_answer_has_the_gateways_text(outcome: dict[str, Any], text: str) -> None:
    """OpenAI's agents end it early, by a stop string."""
    answer = answer_of(outcome["plain"])
    assert len(answer) > 2
    assert text.startswith(answer)


def test_a_stream_has_the_gateways_text_in_pieces(outcome: dict[str, Any], text: str) -> None:
    pieces = answer_of(outcome["stream"])
    assert len(pieces) > 1
    assert "".join(pieces) == text


def test_a_client_library_gets_its_tool_call(outcome: dict[str, Any]) -> None:
    (found,) = answer_of(outcome["tools"])
    assert found.keys() == {"city", "days"}
    assert found["city"] in CITIES
    assert found["days"] in DAYS


@pytest.mark.parametrize("status", STATUSES)
def test_an_error_is_an_exception_of_the_class_for_its_status(
    outcome: dict[str, Any], library: str, status: str
) -> None:
    result = outcome[status]
    assert result.get("error") == LIBRARIES[library].errors[status], result
    assert result["status"] in (int(status), None)
    if library == "aisuite":
        assert f"Error code: {status}" in result["text"]


def test_a_refused_call_comes_again_when_the_gateway_asked_for_it(
    outcome: dict[str, Any], gateway: Gateway, library: str
) -> None:
    """Once, not earlier than `Retry-After` says, and not much later."""
    assert answer_of(outcome["retries"]) == answer_of(outcome["first"])
    records = gateway.limited(library)
    first, _, refused, again = records
    ends = [record.outcome for record in records]
    assert ends == ["completed", "rejected", "rejected", "completed"]
    assert refused.error == "rate_limit_exceeded"
    assert first.arrived_at is not None
    assert refused.arrived_at is not None
    assert again.arrived_at is not None
    asked = PERIOD - (refused.arrived_at - first.arrived_at)
    assert asked > PERIOD / 2, "too slow to tell it from a retry of the library's own accord"
    assert asked <= again.arrived_at - refused.arrived_at + 0.05 <= asked + LATER
