"""What is said of a server that does not answer."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from kendall.remote import key_file, key_for_admin, local_admin_key, unanswered

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


@pytest.mark.parametrize(
    ("url", "port"),
    [("http://127.0.0.1", 80), ("https://localhost/v1", 443), ("http://localhost:8123", 8123)],
)
def test_the_key_of_a_gateway_on_this_machine_is_that_of_its_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, port: int
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    file = key_file(port)
    file.parent.mkdir()
    file.touch(mode=0o600)
    file.write_text("secret", encoding="ascii")
    assert local_admin_key(url) == "secret"
    assert key_for_admin(url, None) == "secret"
    file.chmod(0o640)
    assert local_admin_key(url) is None
