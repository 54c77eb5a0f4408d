"""The admin key that a gateway makes for a run: where it is kept, who finds it, and what it
opens; nginx before the gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kendall.loadgen.gateway.gateway_process import GatewayClient, GatewayError, free_port
from kendall.loadgen.sending.client.target import Keys
from kendall.remote import key_file, key_for_admin, local_admin_key
from kendall.server.operations.reloading import differences, in_force
from kendall.server.security.admin_key import with_admin_key
from kendall.server.security.guard import Guard
from kendall.server.security.keys import holder, read_keys
from kendall.server.security.settings import SecuritySettings
from kendall.server.settings import Settings
from tests.eventually import eventually_here
from tests.server.processes import gateway
from tests.serving import started
from tests.support import missing

API, ADMIN = "sk-client-0123456789", "sk-admin-0123456789"
URL = "http://127.0.0.1:8080"
PRINTED = r"made an admin key for this run, called \w{8} in the log: (\S+);"
EMULATED = ("tiny", "--engine", "emulated", "--latency", "k1=0.1e-3,k2=0.5e-3,k3=10e-6,k4=0.2e-3")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's own runtime directory."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_a_key_is_made_kept_privately_and_gone_at_the_end(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), with_admin_key(SecuritySettings(), 8080) as security:
        file = home / "kendall" / "admin-key-8080"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        text = file.read_text().strip()
        assert len(text) >= 32
        assert holder(security.made_admin_keys, text.encode()) is not None
        assert local_admin_key(URL) == text
        assert [text in record.getMessage() for record in caplog.records] == [True], "printed once"
        assert str(file) in caplog.text
    assert not file.exists()
    assert local_admin_key(URL) is None


def test_folders_that_there_are_not_yet_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user without a runtime directory, whose cache is still empty."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / ".cache"))
    with with_admin_key(SecuritySettings(), 8080) as security:
        text = (tmp_path / "home" / ".cache" / "kendall" / "admin-key-8080").read_text().strip()
        assert holder(security.made_admin_keys, text.encode()) is not None


def test_each_run_has_another_key(home: Path) -> None:
    made = set()
    for _ in range(3):
        with with_admin_key(SecuritySettings(), 8080):
            made.add(local_admin_key(URL))
    assert len(made) == 3


def test_a_key_that_was_given_is_not_written_and_one_left_behind_is_removed(home: Path) -> None:
    given = SecuritySettings(admin_keys=read_keys("--admin-key", [ADMIN], None))
    file = key_file(8080)
    file.parent.mkdir()
    file.write_text("left-behind\n")
    file.chmod(0o600)
    with with_admin_key(given, 8080) as security:
        assert security is given
        assert not file.exists()


def test_the_file_of_a_later_gateway_on_the_port_stays(home: Path) -> None:
    with with_admin_key(SecuritySettings(), 8080):
        key_file(8080).write_text("another\n")
    assert key_file(8080).read_text() == "another\n"


def test_a_link_that_somebody_else_laid_there_is_not_followed(home: Path) -> None:
    file, elsewhere = key_file(8080), home / "elsewhere"
    file.parent.mkdir()
    file.symlink_to(elsewhere)
    with with_admin_key(SecuritySettings(), 8080):
        assert not elsewhere.exists()
        assert not file.is_symlink()


def test_without_a_place_for_the_file_the_gateway_starts_and_says_so(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (home / "kendall").write_text("a file in the place of the folder")
    with caplog.at_level(logging.INFO), with_admin_key(SecuritySettings(), 8080) as security:
        assert len(security.made_admin_keys) == 1
    assert "cannot keep the admin key in a file" in caplog.text
    assert "made an admin key for this run" in caplog.text


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660])
def test_a_key_that_others_could_have_read_or_written_is_not_sent(home: Path, mode: int) -> None:
    with with_admin_key(SecuritySettings(), 8080):
        key_file(8080).chmod(mode)
        assert local_admin_key(URL) is None


@pytest.mark.parametrize(
    "url",
    [
        "http://gateway:8080",
        "http://192.168.1.7:8080",
        "http://127.0.0.1:8081",
        "tiny",
        "http://[",
        "http://x:y",
    ],
)
def test_the_key_goes_to_no_other_server(home: Path, url: str) -> None:
    with with_admin_key(SecuritySettings(), 8080):
        assert local_admin_key(url) is None
        for own in ("http://localhost:8080/v1", "http://[::1]:8080", "https://127.0.0.1:8080/"):
            assert local_admin_key(own) is not None


def test_a_key_that_is_named_wins_over_the_file_and_the_file_over_an_api_key(home: Path) -> None:
    with with_admin_key(SecuritySettings(), 8080):
        assert key_for_admin(URL, ADMIN, API) == ADMIN
        assert key_for_admin(URL, None, API) == local_admin_key(URL)
    assert key_for_admin(URL, None, API) == API


def test_the_key_of_the_run_survives_a_reload_and_keys_that_come_with_it_close_admin() -> None:
    """SIGHUP: what was made for the run is in no configuration; an API key that is added ends
    what this machine may do without one.
    """
    made, api = read_keys("--admin-key", [ADMIN], None), read_keys("--api-key", [API], None)
    before = Settings(
        model="m", served_model_name="m", security=SecuritySettings(made_admin_keys=made)
    )
    after = Settings(model="m", served_model_name="m", security=SecuritySettings(api_keys=api))
    now = in_force(before, after)
    assert differences(now, after) == [], "nothing that an operator changed is left out"
    head: dict[str, Any] = {
        "path": "/admin/policy",
        "method": "PUT",
        "client": ("127.0.0.1", 5),
        "http_version": "1.1",
    }
    bare = [(b"host", b"127.0.0.1:8080")]
    for security, open_to_this_machine in ((before.security, True), (now.security, False)):
        guard = Guard(security)
        assert (guard.rejection(head | {"headers": bare}) is None) == open_to_this_machine
        assert (
            guard.rejection(
                head | {"headers": [*bare, (b"authorization", b"Bearer " + ADMIN.encode())]}
            )
            is None
        )


def test_commands_of_the_user_come_in_and_others_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an API key: the key in the log is the one in the file, and only it opens /admin."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    running = gateway(tmp_path, *EMULATED, "--api-key", API)
    with started(running) as runner:
        port = int(running.url.rpartition(":")[2])
        (printed,) = eventually_here(
            lambda: re.findall(PRINTED, (tmp_path / "gateway.log").read_text())
        )
        assert key_file(port).read_text().strip() == printed
        with httpx.Client(base_url=running.url, trust_env=False) as client:
            for key, status in ((None, 401), ("wrong", 401), (API, 403), (printed, 200)):
                headers = {} if key is None else {"authorization": f"Bearer {key}"}
                assert client.get("/admin/state", headers=headers).status_code == status

        async def ask(keys: Keys) -> None:
            async with GatewayClient(running.url, keys) as found:
                await found.ask("PUT", "/admin/policy", {"policy": "single"})

        runner.run(ask(Keys(API)))  # the file is found, an API key notwithstanding
        with pytest.raises(GatewayError, match="401"):
            runner.run(ask(Keys(API, "wrong")))
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "kendall"))  # another user's
        with pytest.raises(GatewayError, match="403"):
            runner.run(ask(Keys(API)))
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert not key_file(port).exists()


# behind nginx


CONFIGURATION = """
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{port};
        location / {{ {pass_on} }}
    }}
}}
"""
PASSED_ON = {
    "plain": "proxy_pass {url};",
    "version 1.1": 'proxy_http_version 1.1; proxy_set_header Connection ""; proxy_pass {url};',
    "host": "proxy_set_header Host $host; proxy_pass {url};",
    "forwarded": (
        "proxy_set_header X-Forwarded-For $remote_addr; proxy_http_version 1.1; proxy_pass {url};"
    ),
}


@contextlib.contextmanager
def nginx(folder: Path, url: str, pass_on: str) -> Iterator[str]:
    """Debian's nginx before this server; its URL."""
    program = shutil.which(
        "nginx", path=f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin"
    ) or missing("nginx", "`make setup-system` installs it")
    folder.mkdir()
    port, file = free_port(0), folder / "nginx.conf"
    file.write_text(CONFIGURATION.format(folder=folder, port=port, pass_on=pass_on.format(url=url)))
    process = subprocess.Popen(
        [program, "-e", str(folder / "error.log"), "-c", str(file)], stderr=subprocess.DEVNULL
    )
    try:
        found = f"http://127.0.0.1:{port}"

        def passes_on() -> bool:
            assert process.poll() is None, (folder / "error.log").read_text()
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"{found}/health", trust_env=False).status_code == 200
            return False

        eventually_here(passes_on)
        yield found
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.parametrize("keys", [(), ("--api-key", API)], ids=["without keys", "with an API key"])
def test_trap_behind_nginx_on_this_machine_nobody_drains_calibrates_or_becomes_admin(
    keys: tuple[str, ...], tmp_path: Path
) -> None:
    """Its plain `proxy_pass` rewrites Host and adds no header: the gateway sees a direct client
    of this machine.
    """
    running = gateway(tmp_path, *EMULATED, *keys)
    headers = {"authorization": f"Bearer {API}"} if keys else {}
    with started(running) as runner:
        for number, (name, pass_on) in enumerate(PASSED_ON.items()):
            with (
                nginx(tmp_path / f"nginx-{number}", running.url, pass_on) as url,
                httpx.Client(base_url=url, trust_env=False) as client,
            ):
                body = {"model": "tiny", "prompt": "a", "max_tokens": 2}
                assert (
                    client.post("/v1/completions", json=body, headers=headers).status_code == 200
                ), name
                for method, path in (("POST", "/admin/drain"), ("POST", "/admin/calibrate")):
                    assert client.request(method, path, json={}, headers=headers).status_code == (
                        403 if keys else 401
                    ), name
                changed = client.put("/admin/policy", json={"policy": "single"}, headers=headers)
                # without any key, nothing tells a proxy that speaks HTTP/1.1 and adds no header
                # from a client: SECURITY.md says so
                assert changed.status_code == (
                    200 if name == "version 1.1" and not keys else 403
                ), name
        state = runner.run(running.ask("GET", "/admin/state"))
        assert state["draining"] is False


def test_the_drain_of_the_user_works_without_naming_a_key(tmp_path: Path) -> None:
    running = gateway(tmp_path, *EMULATED)
    with started(running) as runner:
        with httpx.Client(base_url=running.url, trust_env=False) as client:
            assert client.post("/admin/drain").status_code == 401
            assert client.put("/admin/policy", json={"policy": "single"}).status_code == 200
        assert runner.run(asyncio.wait_for(running.ask("POST", "/admin/drain"), 60)) == {
            "drained": True
        }
