"""`kendall predict --model-text`: a queue in Kendall's notation and, part by part, in words."""

from typing import Any

import pytest
from typer.testing import CliRunner

import kendall
from kendall.cli import main
from kendall.policies.registry import POLICIES
from kendall.queueing.commands.cli import app

LAW = "k1=0.001,k2=0.004,k3=0.0001,k4=0.002,kp=0.0001"
PARTS = ["arrivals", "requests", "service", "servers", "room", "order of service"]
QUEUES: list[tuple[str, list[str], str, dict[str, list[str]]]] = [
    (
        "single",
        [],
        "M/G/1",
        {
            "arrivals": ["Poisson", "2 requests/s"],
            "requests": ["64 output tokens"],
            "service": ["one request at a time", LAW],
            "servers": ["1 server"],
            "room": ["any number"],
            "order of service": ["first come, first served"],
        },
    ),
    ("capped:max_batch_size=8", [], "M/G^[1,8]/1", {"service": ["all that wait, at most 8"]}),
    ("dynamic", [], "M/G^[1,inf]/1", {"service": ["all that wait"]}),
    ("fixed:batch_size=4,max_wait=2", [], "M/G^4/1", {"service": ["batches of 4", "2 s"]}),
    (
        "continuous:max_batch_size=8,order=spjf",
        ["--servers", "3", "--predictor", "exact"],
        "M/G(n)-PS[8]/3",
        {
            "service": ["at most 8"],
            "servers": ["3 servers", "one queue"],
            "order of service": ["spjf", "exact"],
        },
    ),
    (
        "single",
        ["--max-num-queued-reqs", "10", "--patience", "3s"],
        "M/G/1/10+D",
        {"room": ["at most 10 requests"], "requests": ["3 s leaves unserved"]},
    ),
    ("single", ["--arrival-scv", "4"], "GI/G/1", {"arrivals": ["variation 4", "2 requests/s"]}),
    (
        "single",
        ["--sequences", "deterministic:value=2"],
        "M^X/G/1",
        {"arrivals": ["2 calls/s"], "requests": ["calls of independent numbers"]},
    ),
    (
        "single",
        ["--servers", "2", "--routing", "round_robin"],
        "2 queues M/G/1",
        {"servers": ["2 servers with a queue each", "in turn"]},
    ),
    (
        "single",
        ["--disaggregated", "--prefill-servers", "2", "--prompt-tokens", "uniform:low=1,high=9"],
        "M/G/2 -> ./G/1",
        {
            "servers": ["prefill on 2 engines"],
            "requests": ["5 prompt tokens on average"],
        },
    ),
    (
        "single",
        ["--second-model", "share=0.3,switch=0.4,latency=a=0.02,c=0.1"],
        "M/G/1, two models",
        {"servers": ["second model: 30.0% of the requests", "holds one model"]},
    ),
    (
        "continuous:max_batch_size=8",
        ["--max-context-tokens", "100"],
        "M/G(n)-PS[8]/1",
        {"room": ["KV memory of 100 tokens"]},
    ),
]


def described(policy: str, *options: str, rate: str = "2") -> list[str]:
    argv = ["predict", "--policy", policy, "--latency", LAW, "--arrival-rate", rate]
    argv += ["--output-tokens", "deterministic:value=64", "--model-text", *options]
    found = CliRunner().invoke(app, argv)
    assert found.exit_code == 0, found.output
    return found.stdout.splitlines()


@pytest.mark.parametrize(
    ("policy", "options", "notation", "words"), QUEUES, ids=[case[2] for case in QUEUES]
)
def test_the_notation_comes_first_and_then_a_line_for_each_part(policy, options, notation, words):
    first, *lines = described(policy, *options)
    parts = {line[:18].strip(): line[18:] for line in lines}
    assert first == notation
    assert list(parts) == PARTS
    for part, texts in words.items():
        for text in texts:
            assert text in parts[part]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_queue_without_a_steady_state_is_described_too(policy):
    text = {"fixed": "fixed:batch_size=4", "capped": "capped:max_batch_size=4"}.get(policy, policy)
    first, *lines = described(text, rate="1e6")
    assert "/G" in first
    assert len(lines) == len(PARTS)


def test_python_gives_the_text_of_the_command_and_predict_the_same_notation():
    options: dict[str, Any] = {"servers": 2, "prompt_tokens": "deterministic:value=5"}
    given = ("capped:max_batch_size=8", 2.0, "deterministic:value=64", LAW)
    text = kendall.model_text(*given, **options)
    flags = ["--servers", "2", "--prompt-tokens", "deterministic:value=5"]
    assert text.splitlines() == described(given[0], *flags)
    assert text.splitlines()[0] == kendall.predict(*given, **options).model


def test_it_is_text_only(capsys):
    argv = ["--policy", "single", "--latency", LAW, "--arrival-rate", "2", "--json"]
    with pytest.raises(SystemExit) as ended:
        main(["predict", *argv, "--output-tokens", "deterministic:value=64", "--model-text"])
    assert ended.value.code == 2
    assert "expected one of the two" in capsys.readouterr().err
