"""SIGHUP: what can change while the gateway serves is taken up, the rest is named, and nothing
ends the gateway.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import os
import signal
import ssl
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import kendall.cli
from kendall.policies import SpecError
from kendall.server.admission.settings import OverloadSettings
from kendall.server.operations import cli, serving
from kendall.server.operations.reloading import Reloader, differences, hangups, in_force
from kendall.server.runtime.logs import LogSettings
from kendall.server.security.keys import read_keys
from kendall.server.security.settings import SecuritySettings, TlsSettings
from kendall.server.settings import Settings
from tests.eventually import LIMIT, eventually
from tests.server.asgi import Call, call, completion, running
from tests.server.processes import SocketCall, gateway
from tests.server.test_gateway_signals import FAST, LONGEST, body, ended
from tests.serving import self_signed


def keys(*texts: str) -> SecuritySettings:
    return SecuritySettings(api_keys=read_keys("--api-key", texts, None))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def status(app: Any, key: str) -> int:
    return (await call(app, "POST", "/v1/completions", completion(), bearer(key))).status or 0


def test_keys_are_revoked_and_added_at_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with running(security=keys("the-first-key-of-all", "the-second-key-of-all")) as (
            app,
            gateway,
        ):
            after = dataclasses.replace(
                gateway.settings, security=keys("the-second-key-of-all", "the-third-key-of-all")
            )
            assert [
                await status(app, f"the-{name}-key-of-all") for name in ("first", "second", "third")
            ] == [200, 200, 401]
            await Reloader(gateway, app, lambda: after, lambda: None).reload()
            assert [
                await status(app, f"the-{name}-key-of-all") for name in ("first", "second", "third")
            ] == [401, 200, 200]

    with caplog.at_level(logging.INFO):
        asyncio.run(main())
    assert (
        "SIGHUP: reloaded 2 API keys and 0 admin keys, the limits on queue and rates, log level "
        "info"
    ) in caplog.text


def test_bounds_and_rates_are_in_force_from_the_next_call() -> None:
    async def main() -> None:
        async with running("single") as (app, gateway):
            reloader = Reloader(
                gateway,
                app,
                lambda: dataclasses.replace(gateway.settings, overload=overload),
                lambda: None,
            )
            overload = OverloadSettings(max_num_queued_reqs=1, overload_status=503)
            await reloader.reload()
            gateway.batcher.pause_dispatch(True)
            first = Call(app, "POST", "/v1/completions", completion())
            while not gateway.batcher.unanswered:  # noqa: ASYNC110
                await asyncio.sleep(0)
            assert (
                await asyncio.wait_for(call(app, "POST", "/v1/completions", completion()), LIMIT)
            ).status == 503
            gateway.batcher.pause_dispatch(False)
            overload = OverloadSettings(rate_limit=0.001, rate_limit_burst=1000.0)
            await reloader.reload()
            statuses = [
                (await call(app, "POST", "/v1/completions", completion())).status for _ in range(2)
            ]
            assert statuses == [200, 429]
            overload = OverloadSettings()
            await reloader.reload()
            assert (await call(app, "POST", "/v1/completions", completion())).status == 200
            await first.task

    asyncio.run(main())


def test_the_size_of_a_call_is_bounded_anew() -> None:
    async def main() -> None:
        async with running() as (app, gateway):
            body = completion(n=3)
            assert (await call(app, "POST", "/v1/completions", body)).status == 200
            after = dataclasses.replace(
                gateway.settings, overload=OverloadSettings(max_sequences_per_call=2)
            )
            await Reloader(gateway, app, lambda: after, lambda: None).reload()
            refused = await call(app, "POST", "/v1/completions", body)
            assert (refused.status, refused.json()["error"]["code"]) == (400, "too_many_sequences")

    asyncio.run(main())


def test_another_patience_holds_for_calls_that_come_afterwards() -> None:
    """And begins an epoch, as a change through /admin does; a reload that does not change it
    leaves what /admin set.
    """

    async def main() -> None:
        async with running("single") as (app, gateway):
            after = dataclasses.replace(gateway.settings, patience=0.02)
            reloader = Reloader(gateway, app, lambda: after, lambda: None)
            gateway.batcher.pause_dispatch(True)
            calls = [Call(app, "POST", "/v1/completions", completion()) for _ in range(2)]
            while gateway.batcher.unanswered < 2:  # noqa: ASYNC110
                await asyncio.sleep(0)
            epoch = gateway.batcher.epoch
            await reloader.reload()
            assert (gateway.limits.patience, gateway.batcher.epoch) == (0.02, epoch + 1)
            late = await asyncio.wait_for(call(app, "POST", "/v1/completions", completion()), LIMIT)
            assert (late.status, late.json()["error"]["code"]) == (429, "queue_timeout")
            gateway.batcher.pause_dispatch(False)
            await asyncio.gather(*(made.task for made in calls))
            assert [made.status for made in calls] == [200, 200]
            await call(app, "PUT", "/admin/policy", {"patience": 5.0})
            await reloader.reload()
            assert gateway.limits.patience == 5.0

    asyncio.run(main())


def test_an_endless_patience_is_none() -> None:
    async def main() -> None:
        async with running("single") as (app, gateway):
            for patience in (5.0, math.inf):
                after = dataclasses.replace(gateway.settings, patience=patience)
                await Reloader(gateway, app, lambda after=after: after, lambda: None).reload()
                assert gateway.settings.patience == patience
            assert gateway.limits.patience is None

    asyncio.run(main())


def test_what_waits_goes_on_in_the_order_of_another_aging() -> None:
    """From first come, first served to priorities, and back."""

    async def main() -> None:
        async with running("single") as (app, gateway):
            gateway.batcher.pause_dispatch(True)

            async def reload(aging: float | None) -> None:
                after = dataclasses.replace(
                    gateway.settings, overload=OverloadSettings(priority_aging=aging)
                )
                await Reloader(gateway, app, lambda: after, lambda: None).reload()

            calls: list[Call] = []
            for priority in (3, 2, 1):
                calls.append(
                    Call(
                        app,
                        "POST",
                        "/v1/completions",
                        completion(priority=priority, prompt=[5] * priority),
                    )
                )
                while gateway.batcher.unanswered < len(calls):  # noqa: ASYNC110
                    await asyncio.sleep(0)

            def order() -> list[int]:
                return [waiting.request.priority for waiting in gateway.batcher.waiting]

            assert (order(), gateway.batcher.waiting_tokens) == ([3, 2, 1], 6)
            await reload(60.0)
            assert (order(), gateway.batcher.waiting_tokens) == ([1, 2, 3], 6)
            await reload(None)
            assert (order(), gateway.batcher.waiting_tokens) == ([3, 2, 1], 6)
            gateway.batcher.pause_dispatch(False)
            await asyncio.gather(*(made.task for made in calls))
            assert {made.status for made in calls} == {200}

    asyncio.run(main())


def test_key_files_that_everybody_reads_are_named_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text("the-first-key-of-all\n")

    def security() -> SecuritySettings:
        return SecuritySettings(api_keys=read_keys("--api-key", [], file), key_files=(file,))

    async def main() -> None:
        async with running(security=security()) as (app, gateway):
            reloader = Reloader(
                gateway,
                app,
                lambda: dataclasses.replace(gateway.settings, security=security()),
                lambda: None,
            )
            file.chmod(0o600)
            await reloader.reload()
            assert "can read the keys" not in caplog.text
            file.chmod(0o644)
            await reloader.reload()
            assert f"every user of this machine can read the keys in {file}" in caplog.text
            caplog.clear()
            file.write_text("short\n")
            await reloader.reload()
            assert "fewer than 16 characters" in caplog.text

    asyncio.run(main())


def test_keys_bounds_patience_certificate_and_log_level_are_taken_up_and_nothing_else() -> None:
    before = Settings(
        security=SecuritySettings(tls=TlsSettings(keyfile=Path("k"), certfile=Path("c")))
    )
    overload: dict[str, Any] = {"max_num_queued_reqs": 5, "max_sequences_per_call": 6}
    overload |= {"max_num_queued_tokens": 7, "overload_status": 503, "slo": "p99_ttft=2s"}
    overload |= {"rate_limit": 1.0, "rate_limit_tokens": 2.0, "rate_limit_burst": 3.0}
    overload |= {"priority_aging": 4.0}
    restart: dict[str, Any] = {"queue_events": True, "adaptive_concurrency": True}
    restart |= {"wait_estimates": False, "sse_keep_alive_interval": 1.0}
    keys_now = read_keys("--api-key", ["sk-another-key"], None)
    tls = {"keyfile": Path("k2"), "certfile": Path("c2")}
    security: dict[str, Any] = {"api_keys": keys_now, "admin_keys": keys_now}
    after = Settings(
        port=1,
        patience=3.0,
        max_output_tokens=9,
        overload=OverloadSettings(**overload, **restart),
        logs=LogSettings(level="debug", format="json", prompts=True),
        security=SecuritySettings(
            **security,
            key_files=(Path("f"),),
            metrics_need_key=True,
            tls=TlsSettings(**tls, ca_certs=Path("a")),
        ),
    )
    now = in_force(before, after)
    assert now == dataclasses.replace(
        before,
        patience=3.0,
        overload=OverloadSettings(**overload),
        logs=LogSettings(level="debug"),
        security=SecuritySettings(**security, key_files=(Path("f"),), tls=TlsSettings(**tls)),
    )
    assert set(differences(now, after)) == {
        *("--port", "--max-output-tokens", "--log-format", "--log-prompts", "--metrics-need-key"),
        *("--ssl-ca-certs", "--queue-events", "--adaptive-concurrency", "--wait-estimates"),
        "--sse-keep-alive-interval",
    }


@pytest.mark.parametrize(("old", "new"), [(None, "c"), ("c", None)])
def test_a_socket_neither_begins_nor_ends_tls(old: str | None, new: str | None) -> None:
    before, after = (
        Settings(security=SecuritySettings(tls=TlsSettings(certfile=each and Path(each))))
        for each in (old, new)
    )
    assert in_force(before, after) == before
    assert differences(before, after) == ["--ssl-certfile"]


def test_what_needs_a_restart_is_named_and_not_in_force(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with running("single") as (app, gateway):
            before = gateway.settings
            after = dataclasses.replace(
                before,
                policy="dynamic",
                port=9,
                overload=OverloadSettings(adaptive_concurrency=True, queue_events=True),
                logs=dataclasses.replace(before.logs, prompts=True),
            )
            await Reloader(gateway, app, lambda: after, lambda: None).reload()
            assert gateway.settings == before

    asyncio.run(main())
    assert (
        "in force only after a restart: --port, --policy, --log-prompts, --queue-events, "
        "--adaptive-concurrency"
    ) in caplog.text


def test_a_thread_of_its_own_serves_without_sighup() -> None:
    """Only the main thread can take signals."""

    async def main() -> None:
        before = signal.getsignal(signal.SIGHUP)
        with hangups(lambda: None):
            assert signal.getsignal(signal.SIGHUP) is before

    with ThreadPoolExecutor(1) as threads:
        threads.submit(asyncio.run, main()).result()


def test_options_of_a_part_have_the_name_of_their_flag() -> None:
    before = Settings(model="tiny", served_model_name="tiny")
    after = dataclasses.replace(
        before,
        security=SecuritySettings(tls=TlsSettings(ca_certs=Path("ca.pem"))),
        shutdown_delay=1.0,
    )
    assert differences(before, after) == ["--shutdown-delay", "--ssl-ca-certs"]
    assert differences(before, before) == []


@pytest.mark.parametrize(
    "error",
    [
        SpecError("got --policy 'nonsense'; expected a policy"),
        OSError("the disk is gone"),
        KeyError("what"),
    ],
)
def test_a_configuration_that_is_wrong_changes_nothing(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def read() -> Settings:
        raise error

    async def main() -> None:
        async with running("single") as (app, gateway):
            before, guard = gateway.settings, app.guard  # type: ignore[attr-defined]
            await Reloader(gateway, app, read, lambda: None).reload()
            assert gateway.settings is before
            assert app.guard is guard  # type: ignore[attr-defined]

    asyncio.run(main())
    assert f"SIGHUP: nothing was reloaded: {error}" in caplog.text


def test_the_log_level_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()

    async def main() -> None:
        async with running("single") as (app, gateway):
            after = dataclasses.replace(
                gateway.settings, logs=dataclasses.replace(gateway.settings.logs, level="error")
            )
            await Reloader(gateway, app, lambda: after, lambda: None).reload()

    level = root.level
    try:
        asyncio.run(main())
        assert root.level == logging.ERROR
    finally:
        root.setLevel(level)


def test_the_command_reads_its_own_settings_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flags and environment as they were given, files as they are now."""
    file, keys_file = tmp_path / "kendall.toml", tmp_path / "keys"
    file.write_text("max-num-queued-reqs = 5\npolicy = 'single'\nlog-level = 'info'\n")
    keys_file.write_text("a-key-of-some-length\n")
    monkeypatch.setenv("KENDALL_LOG_LEVEL", "warning")
    found: list[Any] = []

    def serve(settings: Settings, *, read_again: Any) -> int:
        found.append(settings)
        file.write_text("max-num-queued-reqs = 7\npolicy = 'dynamic'\nlog-level = 'debug'\n")
        keys_file.write_text("another-key-of-some-length\n")
        found.append(read_again())
        file.write_text("max-num-queued-reqs = 'seven'\n")
        with pytest.raises(SpecError, match="expected a whole number"):
            read_again()
        return 0

    monkeypatch.setattr(serving, "serve", serve)
    monkeypatch.setattr(cli, "configure_logs", lambda _: None)
    with pytest.raises(SystemExit) as stop:
        kendall.cli.main(
            [
                "serve",
                "--config",
                str(file),
                "--policy",
                "elastic",
                "--api-key-file",
                str(keys_file),
            ]
        )
    assert stop.value.code == 0
    before, after = found
    assert (before.overload.max_num_queued_reqs, after.overload.max_num_queued_reqs) == (5, 7)
    assert before.policy == after.policy == "elastic"
    assert before.logs.level == after.logs.level == "warning"
    assert before.security.api_keys != after.security.api_keys
    assert differences(before, after) == ["--api-keys", "--max-num-queued-reqs"]


def test_a_gateway_takes_up_keys_and_certificate_and_survives_what_is_wrong(tmp_path: Path) -> None:
    keys_file = tmp_path / "keys"
    keys_file.write_text("the-old-key-of-some-length\n")
    certificate, key = self_signed(tmp_path)
    arguments = [
        "tiny",
        "--engine",
        "emulated",
        "--latency",
        FAST,
        "--api-key-file",
        str(keys_file),
    ]
    arguments += ["--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)]
    log = tmp_path / "gateway.log"

    async def hung_up(running: Any, said: str, times: int) -> None:
        os.kill(running.pid, signal.SIGHUP)
        await eventually(lambda: log.read_text().count(said) >= times)

    async def main() -> None:
        running = gateway(tmp_path, *arguments)
        address = "127.0.0.1", int(running.url.rpartition(":")[2])

        def shown() -> str:
            return ssl.get_server_certificate(address)

        async with asyncio.timeout(LONGEST), running:
            while "ready:" not in log.read_text():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            first = await asyncio.to_thread(shown)
            keys_file.write_text("the-new-key-of-some-length\n")
            self_signed(tmp_path)
            await hung_up(
                running, "SIGHUP: reloaded 1 API key and 0 admin keys, the certificate", 1
            )
            second = await asyncio.to_thread(shown)
            assert first != second == certificate.read_text()
            keys_file.write_text("# none\n")
            await hung_up(running, "SIGHUP: nothing was reloaded: got --api-key-file", 1)
            keys_file.write_text("the-new-key-of-some-length\n")
            certificate.write_text("nonsense")
            await hung_up(running, "SIGHUP: nothing was reloaded: got TLS files", 1)
            assert await asyncio.to_thread(shown) == second
            os.kill(running.pid, signal.SIGTERM)
            await ended(running)

    asyncio.run(main())


@pytest.mark.slow
def test_a_hangup_at_any_time_ends_nothing(tmp_path: Path) -> None:
    """From the first line of the log on, also while nothing serves yet; the gateway's own
    processes do not end by it either.
    """

    async def main() -> None:
        running = gateway(
            tmp_path,
            "tiny",
            "--engine",
            "emulated",
            "--latency",
            FAST,
            "--prediction-interval",
            "0.2",
        )
        async with asyncio.timeout(LONGEST), running:
            while not (tmp_path / "gateway.log").read_text():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            for _ in range(50):
                os.killpg(running.pid, signal.SIGHUP)
                await asyncio.sleep(0.02)
            await running.ready()
            os.killpg(running.pid, signal.SIGHUP)
            made = await SocketCall(running.url, body(5, stream=False)).send()
            assert (await made.answer())[0] == 200
            os.kill(running.pid, signal.SIGTERM)
            os.kill(running.pid, signal.SIGHUP)
            await ended(running)

    asyncio.run(main())


def test_an_engine_argument_that_changed_is_named() -> None:
    before = Settings(engine_args={"max_num_seqs": 4, "dtype": "auto"})
    after = Settings(engine_args={"max_num_seqs": 8, "dtype": "auto"})
    assert differences(before, after) == ["the engine argument max_num_seqs"]


def test_a_hangup_while_a_gateway_is_starting_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler is there before a module of the gateway is."""
    found = []

    def command_of(_: str) -> None:
        found.append(signal.getsignal(signal.SIGHUP))
        raise SpecError("got enough; expected no more")

    before = signal.getsignal(signal.SIGHUP)
    monkeypatch.setattr(kendall.cli, "command_of", command_of)
    monkeypatch.setattr(kendall.cli, "_failed", lambda *_: 2)
    for name in ("serve", "load"):
        assert kendall.cli.run_command(name, []) == 2
    assert found == [signal.SIG_IGN, before]
    assert signal.getsignal(signal.SIGHUP) == before
