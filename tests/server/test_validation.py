"""What is told of a body that is not what its route takes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kendall.server.http.api.schema import ChatRequest, CompletionRequest
from kendall.server.http.api.servers import ServersChange
from kendall.server.http.api.unserved import check_unserved
from kendall.server.http.api.validation import check_extra, field_in, refuse_unknown, validate
from kendall.server.runtime.errors import ApiError
from kendall.server.settings import Settings

STRICT = Settings(model="tiny", served_model_name="tiny")
LENIENT = Settings(model="tiny", served_model_name="tiny", unknown_fields="ignore")
KNOWN = {"model": "tiny", "prompt": "x"}


def refused(model: Any, body: object) -> tuple[str, str, str | None]:
    """Code, message and field; the status is always 400."""
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(ApiError) as found:
        validate(sent, model)
    assert found.value.status == 400
    return found.value.code, found.value.message, found.value.param


@pytest.mark.parametrize(
    ("model", "body", "code", "says", "param"),
    [
        (CompletionRequest, b"[1", "invalid_json", "got '[1'; expected JSON (", None),
        (CompletionRequest, [1], "invalid_request", "got '[1]'; expected a JSON object", None),
        (CompletionRequest, {"prompt": "x"}, "invalid_request", "model: Field required", "model"),
        (
            CompletionRequest,
            KNOWN | {"n": 0},
            "invalid_request",
            "n: Input should be greater than or equal to 1; got 0",
            "n",
        ),
        (
            CompletionRequest,
            KNOWN | {"stop": ["x" * 1025]},
            "invalid_request",
            "got stop of 1025 characters; expected at most 1024 in total",
            "stop",
        ),
        (
            ChatRequest,
            {"model": "tiny", "messages": [{"role": "user"}, {}]},
            "invalid_request",
            "messages[1].role: Field required",
            "messages[1].role",
        ),
        (
            ServersChange,
            {"replica": 2},
            "unknown_field",
            "got the field 'replica', which is none of replicas, urls: did you mean replicas?",
            "replica",
        ),
        (
            ServersChange,
            {"replicas": 2, "urls": ["u"]},
            "invalid_request",
            "got both of replicas and urls; expected replicas, of a gateway that starts its "
            "engines, or urls, of one with --engine http",
            "replicas",
        ),
        (ServersChange, {}, "invalid_request", "got neither of replicas and urls; ", "replicas"),
        (ServersChange, {"urls": []}, "invalid_request", "urls: List should have at least", "urls"),
        (ServersChange, {"replicas": 0}, "invalid_request", "replicas: Input should", "replicas"),
        (ServersChange, {"replicas": True}, "invalid_request", "replicas: Input", "replicas"),
    ],
)
def test_the_field_and_what_is_wrong_with_it_are_named(
    model: Any, body: object, code: str, says: str, param: str | None
) -> None:
    found = refused(model, body)
    assert (found[0], found[2]) == (code, param)
    assert found[1].startswith(says)


def test_lists_of_urls_are_bounded() -> None:
    made = validate(json.dumps({"urls": ["u"] * 1024}).encode(), ServersChange)
    assert made.replicas is None
    assert made.urls is not None
    assert len(made.urls) == 1024
    assert refused(ServersChange, {"urls": ["u"] * 1025})[2] == "urls"


def test_so_many_errors_of_one_body_are_looked_at() -> None:
    wrong = {f"field{number}": 1 for number in range(1024)}
    assert refused(ServersChange, wrong)[0] == "unknown_field"
    assert refused(ServersChange, wrong | {"one": 1}) == (
        "invalid_request",
        "got a body with 1025 invalid values; expected none",
        None,
    )


def test_a_list_that_is_too_long_is_told_before_what_else_it_might_have_been() -> None:
    code, message, param = refused(CompletionRequest, KNOWN | {"stop": ["x"] * 17})
    assert (code, param) == ("invalid_request", "stop")
    assert message.startswith("stop: List should have at most 16 items")


def test_a_misspelt_field_is_looked_for_among_so_many() -> None:
    others = {f"odd{number}": 1 for number in range(255)}
    sent = {"model": "tiny", "promt": "x"} | others
    code, message, param = refused(CompletionRequest, sent)
    assert (code, param) == ("unknown_field", "promt")
    assert message == (
        "got the field 'promt', which neither OpenAI nor vLLM has: did you mean prompt?"
    )
    assert refused(CompletionRequest, sent | {"more": 1})[1] == "prompt: Field required"


def test_so_many_fields_that_nobody_knows_are_looked_at() -> None:
    unknown = {f"odd{number}": 1 for number in range(256)}
    assert check_unserved(unknown, {}) == sorted(unknown)
    with pytest.raises(ApiError) as found:
        check_unserved(unknown | {"more": 1}, {})
    assert found.value.message == (
        "got 257 fields that this gateway does not know; expected at most 256"
    )


@pytest.mark.parametrize(
    ("extra", "defaults", "unserved"),
    [
        ({"echo": False, "user": 1, "odd": 2}, {}, None),
        ({"echo": 0}, {}, "echo"),  # 0 == False, and asks for something
        ({"best_of": 2}, {"best_of": 2}, None),
        ({"best_of": 2}, {"best_of": 1}, "best_of"),
        ({"best_of": 2.0}, {"best_of": 2}, "best_of"),
        ({"best_of": None, "tools": []}, {}, None),
        ({"z": 1, "tools": [1], "audio": 1}, {}, "audio"),
    ],
)
def test_a_value_that_asks_for_nothing_is_no_reason_to_refuse(
    extra: dict[str, Any], defaults: dict[str, Any], unserved: str | None
) -> None:
    if unserved is None:
        assert check_unserved(extra, defaults) == [name for name in extra if name == "odd"]
        return
    with pytest.raises(ApiError) as found:
        check_unserved(extra, defaults)
    assert (found.value.status, found.value.param) == (501, unserved)


def test_a_long_name_is_repeated_in_part() -> None:
    with pytest.raises(ApiError) as found:
        refuse_unknown(STRICT, ["x " * 41], ["prompt"], "which is odd")
    name = "x " * 40
    assert found.value.message == f"got the field '{name}', which is odd: leave it out"
    assert found.value.param == name
    refuse_unknown(LENIENT, ["x"], ["prompt"], "which is odd")
    refuse_unknown(STRICT, [], ["prompt"], "which is odd")


def test_fields_that_are_served_elsewhere_are_not_looked_at() -> None:
    call = CompletionRequest.model_validate(KNOWN | {"echo": True, "best_of": 2})
    check_extra(STRICT, call, {"best_of": 2}, {"echo"})
    with pytest.raises(ApiError) as found:
        check_extra(STRICT, call, {"best_of": 2})
    assert found.value.param == "echo"


def test_the_first_field_that_a_message_names_is_the_one_to_change() -> None:
    assert field_in("got max_tokens=0, and n: no echo", {"n", "echo", "max_tokens"}) == "max_tokens"
    assert field_in("nothing of these", {"n"}) is None
