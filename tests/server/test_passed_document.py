"""Whatever the OpenAPI document of a real `vllm serve` allows, and what it does not, has the same
status with the gateway before it as without.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode

from bench.gateway_cost.servers import small_vllm
from kendall.loadgen.gateway.gateway_process import GatewayProcess, free_port
from kendall.server.http.proxied.endpoints import ENDPOINTS, RELAYED
from tests.server.counts import tell
from tests.serving import started

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]
SLOTS, CONTEXT = 4, 256  # answers without a limit fill the context
EXAMPLES = 60  # of a route, allowed ones and others each
MOST = 3  # of what multiplies the work of a call
MULTIPLIES = ("n", "best_of")
GOOD = {
    "model": "tiny",
    "prompt": "hello",
    "input": "hello",
    "tokens": [5, 6],
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 5,
    "max_output_tokens": 5,
}
PATHS = [*ENDPOINTS, *RELAYED]
SLOW = 60.0  # seconds for one answer


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """To the server, and to the gateway before it."""
    folder = tmp_path_factory.mktemp("document")
    with small_vllm(folder, SLOTS, context=CONTEXT) as vllm:
        arguments = ["--engine", "http", "--engine-url", vllm.url, "--prediction-interval", "0"]
        arguments += ["--max-num-seqs", str(SLOTS)]
        gateway = GatewayProcess(arguments, free_port(0), folder / "gateway.log")
        with started(gateway), client(vllm.url) as straight, client(gateway.url) as through:
            yield straight, through


def client(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=SLOW, trust_env=False)


def body_of(case: Case, good: dict[str, Any], data: st.DataObject) -> bytes | None:
    """As JSON, for the model that there is; half of them well made but for two fields, as many
    odd ones seldom go together.
    """
    body: Any = case.body
    if isinstance(body, dict):
        names = sorted(body)
        if names and data.draw(st.booleans()):
            kept = data.draw(st.sets(st.sampled_from(names), max_size=2))
            body = good | {name: body[name] for name in kept}
        body = dict(body)
        if isinstance(body.get("model"), str):
            body["model"] = "tiny"
        for name in MULTIPLIES:
            if isinstance(body.get(name), int) and body[name] > MOST:
                body[name] = MOST
    try:
        return json.dumps(body).encode()
    except (TypeError, ValueError):  # nothing, or what is no JSON
        return None


def good_body(document: dict[str, Any], path: str) -> dict[str, Any]:
    """Of the route; the first alternative where it has several."""
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schema = schema.get("anyOf", [schema])[0]
    known = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]["properties"]
    return {name: value for name, value in GOOD.items() if name in known}


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.name.lower())
@pytest.mark.parametrize("path", PATHS)
def test_statuses_are_those_of_the_server(
    path: str, mode: GenerationMode, both: tuple[httpx.Client, httpx.Client]
) -> None:
    document = both[0].get("/openapi.json").json()
    if path not in document["paths"]:
        statuses = {each.post(path, json={"model": "tiny"}).status_code for each in both}
        assert statuses == {404}
        return
    operation = schemathesis.openapi.from_dict(document)[path]["POST"]
    good = good_body(document, path)
    seen: Counter[int] = Counter()

    @given(case=operation.as_strategy(generation_mode=mode), data=st.data())
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def same(case: Case, data: st.DataObject) -> None:
        content = body_of(case, good, data)
        if content is None:
            return
        headers = {"content-type": "application/json"}
        direct, passed = (each.post(path, content=content, headers=headers) for each in both)
        seen[direct.status_code] += 1
        assert passed.status_code == direct.status_code, (content[:500], passed.text, direct.text)

    same()
    tell(path, mode=mode.name, statuses=seen)
    assert seen[400] or mode is GenerationMode.POSITIVE
    assert seen[200] or mode is GenerationMode.NEGATIVE
