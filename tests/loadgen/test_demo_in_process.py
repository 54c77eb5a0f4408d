"""The demo against a gateway in this process: its flags, what it asks for, writes and says."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import kendall.loadgen.commands.demo as demo_module
from kendall.loadgen.commands.demo import run_demo
from kendall.loadgen.commands.demo_plan import DemoPlan
from kendall.loadgen.gateway.gateway_process import GatewayClient, GatewayError
from kendall.queueing.measurement.record import Header, read_run, to_line
from tests.kept_values import moved
from tests.loadgen.fake_gateway import LAW, FakeGateway, phases_of, serving

SIZES = {"max_output_tokens": 32, "prompt_tokens": 32}


class Child(GatewayClient):
    """Stands for the process that the demo starts."""

    url_of: str
    made: Child
    ends: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, arguments: list[str], port: int, log_file: Path) -> None:
        super().__init__(self.url_of)
        self.arguments, self.port, self.log_file = arguments, port, log_file
        record_file = Path(arguments[arguments.index("--record-file") + 1])
        record_file.write_bytes(to_line(Header(writer="gateway")))
        Child.made = self

    async def ready(self) -> None: ...

    async def finished(self) -> None:
        self.ends()

    def last_line(self) -> str:
        return "killed"


def cancelled() -> None:
    raise asyncio.CancelledError


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Comparisons that would have been drawn."""
    found: list[Any] = []

    def draw(comparisons: list[Any], path: Path) -> Path:
        found.extend(comparisons)
        return path

    monkeypatch.setattr(demo_module, "draw_picture", draw)
    monkeypatch.setattr(demo_module, "GatewayProcess", Child)
    return found


def run(folder: Path, *speeds: float, once: bool = True, **about: Any) -> tuple[FakeGateway, str]:
    folder.mkdir(exist_ok=True)
    fake, to = FakeGateway(folder, *speeds), io.StringIO()
    fake.foreign = True
    given: dict[str, Any] = {
        "folder": folder,
        "scale": 0.015,
        "policies": ("dynamic",),
        "loads": (0.3,),
    }
    plan = DemoPlan(**(given | about))

    async def demo() -> None:
        async with serving(fake):
            Child.url_of = fake.url
            await run_demo(plan, Console(file=to, width=80), once=once)

    asyncio.run(demo())
    return fake, to.getvalue()


def test_two_cells_of_a_demo(
    tmp_path: Path,
    drawn: list[Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    phases = phases_of(monkeypatch)
    (tmp_path / "gateway.jsonl").write_text("of an earlier run")
    policies = ("fixed:batch_size=4", "dynamic")
    fake, out = run(tmp_path, 1.0, 1.1, 1.2, policies=policies, port=8081, seed=3, scale=0.0149)
    assert (Child.made.port, Child.made.log_file) == (8081, tmp_path / "gateway.log")
    assert Child.made.arguments == [
        *("tiny", "--engine", "auto", "--allow-forced-lengths", "--max-output-tokens", "32"),
        *("--max-num-queued-reqs", "0", "--max-num-seqs", "16"),
        *("--record-file", str(tmp_path / "gateway.jsonl"), "--served-model-name", "tiny"),
    ]
    assert fake.asked == [
        ("calibrate", {"repeats": 5} | SIZES),
        ("policy", {"policy": "fixed:batch_size=4", "max_output_tokens": 32}),
        ("policy", {"policy": "dynamic", "max_output_tokens": 32}),
    ]
    assert moved("demo-phases.json", {"": lambda: phases}) == []
    found = json.loads((tmp_path / "comparison.json").read_text())
    assert [each.of_others for each in drawn] == [1, 0], "one request of another client"
    assert [each["policy"] for each in found] == list(policies)
    assert [sorted(each["check"]) for each in found] == [sorted(found[0]["check"])] * 2
    assert {"observed", "modelled", "ratio_low", "ratio_high", "verdict"} <= set(found[0]["check"])
    assert [each["load"] for each in found] == [0.3, 0.3] == [each.load for each in drawn]
    for policy, batch in (("fixed", 4), ("dynamic", 1)):
        header, records = read_run(tmp_path / f"gateway-0.3-{policy}.jsonl")
        load_header, sent = read_run(tmp_path / f"load-0.3-{policy}.jsonl")
        assert len(records) == len(sent) + (policy == "fixed")
        assert len(sent) % batch == 0
        for each in (header, load_header):
            assert each.configuration["output_tokens"] == "uniform:low=6,high=18"
            assert each.configuration["load"] == 0.3
            assert each.configuration["max_output_tokens"] == 32
            assert each.seed == 3
        assert len(sent) == batch * max(
            1, round(header.configuration["request_rate"] * 12.0 * 0.0149 / batch)
        )
        assert {each.prompt_tokens for each in records if each.client_request_id} == {32}
        lengths = [record.output_tokens or 0 for record in sent]
        assert 6 <= min(lengths) <= max(lengths) <= 18
    assert json.loads((tmp_path / "profile.json").read_text())["law"]["k2"] == LAW.k2
    assert "run files and picture: " in out
    assert "(observed-and-predicted.png)" in out
    assert f"kendall compare --sweep {tmp_path}\n" in out
    assert "#zoom" not in out
    said = [re.sub(r"^ +\d+ s  ", "", line) for line in capsys.readouterr().err.splitlines()]
    assert said[:4] == [
        f"the gateway is at {fake.url}/; port 8080 is in use; requests of other clients would "
        "disturb what is measured",
        "2 cells of 0 s, in all about 40 s; the engine starts",
        "engine ready",
        "law: R2 0.9900, cells within 2.0% on average",
    ]
    assert [line.partition(":")[0] for line in said[4:]] == ["fixed", "dynamic at 0.3"]


@pytest.mark.slow
def test_it_serves_on_until_it_is_interrupted_or_the_gateway_ends(
    tmp_path: Path, drawn: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Child, "ends", staticmethod(cancelled))
    fake, out = run(tmp_path / "first", 1.0, 1.0, once=False)
    last = out.splitlines()[-1]
    zoom = re.fullmatch(rf"{fake.url}/#zoom=(\d+)-(\d+)", last)
    assert zoom is not None, last
    began, ended = map(int, zoom.groups())
    assert 0 < ended - began < 60 * 60
    monkeypatch.setattr(Child, "ends", staticmethod(lambda: None))
    with pytest.raises(GatewayError, match=r"^the gateway ended: killed$"):
        run(tmp_path / "second", 1.0, 1.0, once=False)
    assert [each.load for each in drawn] == [0.3, 0.3]
