"""What is said of a server that does not answer."""

from __future__ import annotations

import httpx
import pytest

from kendall.remote import unanswered

DROPPED = httpx.RemoteProtocolError("Server disconnected without sending a response.")


def test_a_connection_that_is_closed_before_the_answer_may_have_wanted_tls() -> None:
    asked = "it closed the connection; does it speak https?"
    assert unanswered(DROPPED, "http://127.0.0.1:1") == asked
    assert unanswered(DROPPED, "HTTP://127.0.0.1:1") == asked


@pytest.mark.parametrize(
    ("error", "url", "expected"),
    [
        (DROPPED, "https://127.0.0.1:1", str(DROPPED)),
        (httpx.ConnectError("no route"), "http://127.0.0.1:1", "no route"),
        (httpx.ConnectError(""), "http://127.0.0.1:1", "ConnectError"),
    ],
)
def test_any_other_error_speaks_for_itself(error: Exception, url: str, expected: str) -> None:
    assert unanswered(error, url) == expected
