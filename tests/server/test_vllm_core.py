"""What vLLM is told of a sequence: its parameters and prompt, in vLLM's own types. No engine."""

from __future__ import annotations

from typing import Any

import pytest

from kendall.policies import Request
from kendall.server.engines.base import EngineRequest, Sampling, Structured

pytestmark = [
    pytest.mark.left_out,
    pytest.mark.engine,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of vLLM's imports
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
SAME: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.2,
    "seed": 11,
    "logprobs": 3,
    "prompt_logprobs": 4,
    "ignore_eos": True,
}


def params(max_tokens: int = 9, *, made: int = 0, **more: Any) -> Any:
    from kendall.server.engines.vllm.core import sampling_params

    how = {name: more.pop(name) for name in ("runs_on", "keep_seed") if name in more}
    return sampling_params(
        Sampling(max_tokens=50, **more),
        max_tokens=max_tokens,
        made=made,
        **{"runs_on": False, "keep_seed": True, **how},
    )


def test_each_parameter_goes_on_as_it_is() -> None:
    found = params(**SAME)
    assert {name: getattr(found, name) for name in SAME} == SAME
    assert found.max_tokens == 9, "its limit is what is left"
    assert (found.detokenize, found.output_kind.name, found.n) == (False, "DELTA", 1)
    assert not found.stop, "the gateway finds stop strings"
    lists = params(
        logit_bias={3: 1.5}, allowed_token_ids=(1, 2), bad_words=("x",), stop_token_ids=(7, 8)
    )
    assert (lists.logit_bias, lists.allowed_token_ids, lists.bad_words) == ({3: 1.5}, [1, 2], ["x"])
    assert lists.stop_token_ids == [7, 8]
    plain = params()
    assert (plain.logit_bias, plain.allowed_token_ids, plain.ignore_eos) == (None, None, False)
    assert plain.structured_outputs is None


def test_one_that_runs_on_stops_at_nothing_but_its_limit() -> None:
    found = params(runs_on=True, stop_token_ids=(7,), seed=3)
    assert (found.ignore_eos, found.stop_token_ids, found.seed) == (True, [], 3)
    assert params(keep_seed=False, seed=3).seed is None


@pytest.mark.parametrize(
    ("least", "made", "most", "left"), [(5, 0, 9, 5), (5, 2, 9, 3), (5, 7, 9, 0), (50, 0, 9, 9)]
)
def test_the_least_number_of_tokens_counts_those_that_are_made(
    least: int, made: int, most: int, left: int
) -> None:
    assert params(most, made=made, min_tokens=least).min_tokens == left


def test_a_form_is_vllms_or_the_one_that_was_prepared() -> None:
    asked = Structured("regex", "a+", {"disable_any_whitespace": True})
    found = params(structured=asked).structured_outputs
    assert (found.regex, found.json, found.disable_any_whitespace) == ("a+", None, True)
    prepared = Structured("regex", "a+", prepared=found)
    made = params(structured=prepared)
    assert made.structured_outputs is found
    made.verify(None, None, None, None)  # nothing is left to check


def request(**more: Any) -> EngineRequest:
    asked = Request(id="r", arrived_at=0.0, prompt_tokens=2, max_output_tokens=9)
    return EngineRequest(asked, (1, 2), Sampling(max_tokens=9), **more)


def test_a_prompt_has_what_was_made_behind_it() -> None:
    from kendall.server.engines.vllm.core import prompt_of

    assert prompt_of(request(output_token_ids=(3,)))["prompt_token_ids"] == [1, 2, 3]
    assert prompt_of(request(cache_salt="s"))["cache_salt"] == "s"
    rendered = {"prompt_token_ids": [9], "multi_modal_data": "an image"}
    assert prompt_of(request(rendered=rendered, output_token_ids=(3,))) == {
        "prompt_token_ids": [1, 2, 3],
        "multi_modal_data": "an image",
    }
