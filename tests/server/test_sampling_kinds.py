"""The kinds of sampling that the real engine is tried with are all that there are, and each is
preempted or kept as it should be.
"""

from __future__ import annotations

import json

import pytest

from kendall.server.engines.base import Sampling
from kendall.server.http.api.checked_call import sampling_of
from kendall.server.http.api.schema import CompletionRequest
from kendall.server.queue.continuing import resumable
from tests.server.sampling_kinds import EXACT, KEPT, SAMPLED, Body, named

OTHER_NAMES = {"structured_outputs": "structured"}  # of a body: of the engine


@pytest.mark.parametrize(
    ("body", "goes_on"),
    [(body, True) for kinds in (EXACT, SAMPLED) for body in kinds.values()]
    + [(body, False) for body in KEPT.values()],
)
def test_a_kind_may_be_preempted_or_not(body: Body, *, goes_on: bool) -> None:
    call = CompletionRequest.model_validate_json(
        json.dumps({"model": "tiny", "prompt": "a"} | body)
    )
    assert resumable(sampling_of(call, 24, {})) is goes_on


def test_every_parameter_of_sampling_is_in_some_kind() -> None:
    known = {OTHER_NAMES.get(name, name) for name in named()} | {"max_tokens", "ignore_eos"}
    known |= {"prompt_logprobs", "thinking_token_budget"}  # of vLLM's serving objects
    assert known == set(Sampling.__struct_fields__)


def test_a_call_that_says_nothing_takes_the_models_own_sampling() -> None:
    own = {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.05, "max_tokens": 9}
    silent = CompletionRequest(model="smollm2", prompt="a")
    sampling = sampling_of(silent, 24, own)
    assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty) == (0.2, 0.9, 1.05)
    assert sampling.max_tokens == 24
    said = CompletionRequest(model="smollm2", prompt="a", temperature=0.0, top_p=1.0)
    sampling = sampling_of(said, 24, own)
    assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty) == (0.0, 1.0, 1.05)
    assert sampling_of(silent, 24, {}) == Sampling(max_tokens=24)
