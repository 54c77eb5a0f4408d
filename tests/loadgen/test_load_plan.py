"""What `kendall load` is about to send, by its options, and what it says of options that it cannot
take: as kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kendall.loadgen.sending.options import LoadOptions
from kendall.loadgen.sending.plan import LoadPlan, plan_load
from kendall.policies.text import SpecError
from kendall.queueing.arrivals.timetable import save_timetable
from kendall.remote import Trust, host_url
from tests.kept_values import moved

URL = "http://h:1"
TRACE = "timestamp,input_length,output_length"
PLANS: dict[str, dict[str, Any]] = {
    "rate": {"request_rate": 5.0, "num_prompts": 20},
    "usual number": {"request_rate": 5.0},
    "seeded": {"request_rate": 5.0, "num_prompts": 20, "seed": 7},
    "duration": {"request_rate": 5.0, "duration": 3.0},
    "all at once": {"request_rate": math.inf, "num_prompts": 5},
    "bursty": {"request_rate": 5.0, "burstiness": 0.3, "num_prompts": 20},
    "regular": {"request_rate": 5.0, "burstiness": math.inf, "num_prompts": 20},
    "arrivals": {"arrivals": "gamma:rate=4,burstiness=2", "num_prompts": 20},
    "lengths": {
        "request_rate": 5.0,
        "num_prompts": 20,
        "prompt_tokens": "uniform:low=2,high=9",
        "output_tokens": "uniform:low=1,high=50",
    },
    "clipped": {
        "request_rate": 5.0,
        "num_prompts": 20,
        "output_tokens": "uniform:low=1,high=50",
        "max_tokens": 9,
    },
    "max tokens": {"request_rate": 5.0, "num_prompts": 20, "max_tokens": 9},
    "natural": {"request_rate": 5.0, "num_prompts": 20, "natural_lengths": True},
    "ignore eos": {"request_rate": 5.0, "num_prompts": 20, "ignore_eos": True},
    "predicted": {
        "request_rate": 5.0,
        "num_prompts": 20,
        "output_tokens": "uniform:low=1,high=50",
        "predictor": "lognormal:sigma=0.5",
    },
    "flows": {"request_rate": 5.0, "num_prompts": 20, "flows": "heavy=3,light=1"},
    "closed loop": {"max_concurrency": 3, "num_prompts": 20},
    "closed loop that thinks": {
        "max_concurrency": 3,
        "num_prompts": 20,
        "think_time": 0.5,
        "duration": 9.0,
    },
    "closed loop of the usual number": {"max_concurrency": 3, "duration": 2.0},
    "partly closed": {"request_rate": 5.0, "num_prompts": 20, "max_concurrency": 4},
    "ramp": {
        "ramp_up_strategy": "linear",
        "ramp_up_start_rps": 1.0,
        "ramp_up_end_rps": 9.0,
        "duration": 5.0,
    },
    "exponential ramp of a number": {
        "ramp_up_strategy": "exponential",
        "ramp_up_start_rps": 1.0,
        "ramp_up_end_rps": 9.0,
        "num_prompts": 30,
    },
    "ramp of the usual number": {
        "ramp_up_strategy": "linear",
        "ramp_up_start_rps": 10.0,
        "ramp_up_end_rps": 90.0,
    },
    "sending": {
        "request_rate": 5.0,
        "num_prompts": 20,
        "processes": 2,
        "token_times": True,
        "drain_limit": 3.0,
        "max_errors": 4,
        "ready_check_timeout": 2.0,
        "model": "m",
        "chat": True,
        "api_key": "k",
        "dataset_name": "random",
    },
}


def shown(plan: LoadPlan) -> dict[str, Any]:
    return {
        "target": plan.target,
        "instants": plan.timetable.intended_at,
        "prompt tokens": plan.timetable.prompt_tokens,
        "output tokens": plan.timetable.output_tokens,
        "predicted": plan.timetable.predicted_output_tokens,
        "flow": None if plan.timetable.flow is None else plan.timetable.flow.tolist(),
        "prompts": [list(map(int, prompt)) for prompt in plan.prompts[:2]],
        "seed": plan.seed,
        "process": plan.process,
        "asked rate": plan.asked_rate,
        "header": dict(plan.header),
        "closed loop": None
        if plan.sending.closed_loop is None
        else [
            plan.sending.closed_loop.users,
            plan.sending.closed_loop.duration,
            plan.sending.closed_loop.think_times,
        ],
        "max concurrency": plan.sending.max_concurrency,
        "processes": plan.sending.processes,
        "token times": plan.sending.token_times,
        "drain limit": plan.sending.drain_limit,
        "max errors": plan.sending.max_errors,
        "ready timeout": plan.ready_timeout,
        "lengths open": plan.lengths_open,
        "announced": plan.announced,
        "poisson": plan.poisson,
    }


def test_plans_are_as_kept() -> None:
    def of(options: dict[str, Any]) -> Callable[[], Any]:
        return lambda: shown(plan_load(LoadOptions(base_url=URL, **options)))

    assert moved("load-plans.json", {name: of(options) for name, options in PLANS.items()}) == []


def test_recorded_instants_are_as_kept(tmp_path: Path) -> None:
    trace, timetable = tmp_path / "trace.csv", tmp_path / "x.timetable"
    rows = [f"2023-11-16 18:15:{second:02d}.5,{9 + second},{3 + second}" for second in range(8)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    drawn = plan_load(
        LoadOptions(
            base_url=URL,
            request_rate=5.0,
            num_prompts=12,
            seed=4,
            output_tokens="uniform:low=1,high=50",
        )
    )
    save_timetable(timetable, drawn.timetable, {"seed": 4, "lengths": "natural"})

    def of(**options: Any) -> Callable[[], Any]:
        def found() -> Any:
            plan = shown(plan_load(LoadOptions(base_url=URL, **options)))
            for name in ("trace", "timetable"):
                plan["header"].pop(name, None)
            return plan

        return found

    assert (
        moved(
            "recorded-plans.json",
            {
                "trace": of(trace=trace),
                "first of a trace, twice as slow": of(trace=trace, num_prompts=3, time_scale=2.0),
                "a trace up to an instant": of(trace=trace, duration=4.0),
                "timetable": of(timetable=timetable),
                "timetable under another seed": of(timetable=timetable, seed=9, num_prompts=5),
                "a timetable up to an instant": of(timetable=timetable, duration=1.0),
            },
        )
        == []
    )
    with pytest.raises(SpecError, match=r"^got no request within 1e-09 s; expected at least one$"):
        plan_load(LoadOptions(base_url=URL, timetable=timetable, duration=1e-9))


WRONG: dict[str, dict[str, Any]] = {
    "max tokens": {"max_tokens": 0},
    "number": {"num_prompts": 0},
    "concurrency": {"max_concurrency": 0},
    "processes": {"processes": 0},
    "errors": {"max_errors": -1},
    "drain": {"drain_limit": -0.1},
    "drain, no number": {"drain_limit": math.nan},
    "think time": {"think_time": -0.1},
    "ready": {"ready_check_timeout": -0.1},
    "ready without end": {"ready_check_timeout": math.inf},
    "duration": {"duration": 0.0},
    "duration without end": {"duration": math.inf},
    "both lengths": {"ignore_eos": True, "natural_lengths": True},
    "dataset": {"dataset_name": "sharegtp"},
    "dataset without a file": {"dataset_name": "sharegpt"},
    "random dataset of a file": {"dataset_name": "random", "dataset_path": Path("x.json")},
    "two sources": {"arrivals": "poisson:rate=3"},
    "think time in an open loop": {"think_time": 0.5},
    "burstiness of arrivals": {
        "request_rate": None,
        "arrivals": "poisson:rate=3",
        "burstiness": 2.0,
    },
    "no source": {"request_rate": None},
    "ramp alone": {"request_rate": None, "ramp_up_strategy": "linear", "ramp_up_start_rps": 1.0},
    "ramp of no shape": {
        "request_rate": None,
        "ramp_up_strategy": "line",
        "ramp_up_start_rps": 1.0,
        "ramp_up_end_rps": 2.0,
    },
    "a flow without a weight": {"flows": "heavy"},
    "prediction of nothing": {"predictor": "exact"},
    "no timetable": {"request_rate": None, "timetable": Path("/nowhere/x.timetable")},
    **{
        f"URL {url!r}": {"base_url": url}
        for url in (
            "",
            " ",
            "h:1",
            "ftp://h:1",
            "http://",
            "http://h:1?x=1",
            "http://h:1#x",
            "http://h:1/v1/completions",
            "http://h:1/v1/chat/completions/",
            "http://h:1/v1/models",
            "http://user:secret@h:1",
        )
    },
}


def test_refusals_are_as_kept() -> None:
    def of(options: dict[str, Any]) -> Callable[[], str]:
        def said() -> str:
            given: dict[str, Any] = {"base_url": URL, "request_rate": 5.0} | options
            with pytest.raises(SpecError) as refused:
                plan_load(LoadOptions(**given))
            return str(refused.value)

        return said

    assert moved("load-refusals.json", {name: of(about) for name, about in WRONG.items()}) == []


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 1},
        {"num_prompts": 1},
        {"max_concurrency": 1},
        {"max_errors": 0},
        {"drain_limit": 0.0},
        {"ready_check_timeout": 0.0},
        {"duration": 0.5},
    ],
)
def test_the_smallest_of_each_option_is_taken(options: dict[str, Any]) -> None:
    plan_load(LoadOptions(base_url=URL, request_rate=50.0, **options))


@pytest.mark.parametrize(
    ("rate", "number", "said"),
    [
        (1.0, 400, None),
        (
            1e-4,
            1,
            "the 1 request is due",
        ),
        (0.01, 20, "the last of 20 requests is due"),
    ],
)
def test_a_long_run_is_announced(rate: float, number: int, said: str | None) -> None:
    announced = plan_load(
        LoadOptions(base_url=URL, request_rate=rate, num_prompts=number)
    ).announced
    if said is None:
        assert announced is None
    else:
        assert announced is not None
        assert announced.startswith(said)
        assert announced.endswith(
            " after the start; a higher rate or fewer requests (--num-prompts) shorten the run"
        )


def test_certificates_are_read_before_anything_is_sent() -> None:
    """Also where no server is asked first."""
    trust = Trust(Path("nowhere.pem"))
    with pytest.raises(SpecError, match=r"got --cacert nowhere\.pem: No such file"):
        plan_load(LoadOptions(base_url=URL, model="m", request_rate=5.0, trust=trust))


def test_the_address_of_a_host() -> None:
    assert host_url("h", 8000) == "http://h:8000"
    assert host_url("::1", 81) == "http://[::1]:81"
    with pytest.raises(SpecError, match="; --base-url takes a URL"):
        host_url("http://h", 80)


def test_a_conversation_that_the_endpoint_cannot_take_is_refused_before_anything_is_sent(
    tmp_path: Path,
) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text('{"messages":[{"role":"user","content":"hello"}],"output_tokens":3}\n')
    about: dict[str, Any] = {"dataset_name": "custom", "dataset_path": path, "num_prompts": 1}
    with pytest.raises(SpecError, match="expected --chat"):
        plan_load(LoadOptions(base_url=URL, request_rate=5.0, **about))
    plan_load(LoadOptions(base_url=URL, request_rate=5.0, chat=True, **about))


def test_a_port_that_there_is_not_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(SpecError, match="99999"):
        plan_load(LoadOptions(base_url="http://127.0.0.1:99999", model="m", request_rate=5.0))
