"""Where a setting comes from: default, file, environment, flag, the later wins; what is unknown
or of another type is an error.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
import tomllib
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

import kendall.cli
from kendall.server.admission.settings import MAX_QUEUED, OverloadSettings
from kendall.server.operations import cli, serving
from kendall.server.operations.configuration.file import is_secret, key_of
from kendall.server.operations.configuration.show import Shown, as_json, as_toml
from kendall.server.runtime import logs
from kendall.server.runtime.logs import (
    JsonFormatter,
    LogSettings,
    vllm_configuration,
)
from kendall.server.security.keys import read_keys
from kendall.server.security.settings import TlsSettings
from kendall.server.settings import Settings
from tests.serving import self_signed

Serve = Callable[..., Settings]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for variable in [name for name in os.environ if name.startswith("KENDALL_")]:
        monkeypatch.delenv(variable)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """`kendall serve` up to the point at which it would listen; returns its settings."""

    def run(*arguments: str) -> Settings:
        found: list[Settings] = []
        monkeypatch.setattr(serving, "serve", lambda settings, **_: found.append(settings) or 0)
        monkeypatch.setattr(cli, "configure_logs", lambda _: None)
        with pytest.raises(SystemExit) as stop:
            kendall.cli.main(["serve", *arguments])
        assert stop.value.code == 0
        return found[0]

    return run


def status(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        kendall.cli.main(list(arguments))
    return int(stop.value.code or 0)


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    """The one line about wrong arguments, or with `code` 1 about something else that is wrong."""
    assert status(*arguments) == code
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    return lines[0]


# layers


def test_a_later_source_wins(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "kendall.toml"
    file.write_text(
        'policy = "single"\npatience = 5\nport = 9001\nmax-num-seqs = 3\nmodel = '
        '"there"\n[engine-args]\nseed = 7\nblock-size = 16\n'
    )
    defaults = serve()
    assert (defaults.policy, defaults.patience, defaults.port, defaults.model) == (
        "continuous",
        None,
        8080,
        "tiny",
    )
    filed = serve("--config", str(file))
    assert (filed.policy, filed.patience, filed.port, filed.model) == ("single", 5.0, 9001, "there")
    assert filed.engine_args == {"seed": 7, "block_size": 16, "max_num_seqs": 3}
    monkeypatch.setenv("KENDALL_PATIENCE", "6")
    monkeypatch.setenv("KENDALL_POLICY", "dynamic")
    monkeypatch.setenv("KENDALL_CONFIG", str(file))
    both = serve()
    assert (both.policy, both.patience, both.port) == ("dynamic", 6.0, 9001)
    flagged = serve("--policy", "elastic", "--engine-arg", "seed=8")
    assert (flagged.policy, flagged.patience, flagged.port) == ("elastic", 6.0, 9001)
    assert flagged.engine_args["seed"] == "8"


def test_every_kind_of_value_is_read_from_a_file(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "kendall.toml"
    file.write_text(
        "calibrate = true\nprediction_interval = 2\nrecord-file = "
        f'"{tmp_path}/r.jsonl"\nautopilot_policies = ["single", "dynamic"]\napi-key = ["sk-1", '
        '"sk-2"]\nadmin-key = "sk-3"\nallowed-origins = '
        '["https://a.example"]\nallow-forced-lengths = true\n'
    )
    found = serve("--config", str(file))
    assert (found.calibrate, found.prediction_interval, found.record_file) == (
        True,
        2.0,
        tmp_path / "r.jsonl",
    )
    assert (found.autopilot_policies, found.allow_forced_lengths) == (("single", "dynamic"), True)
    assert (len(found.security.api_keys), len(found.security.admin_keys)) == (2, 1)
    assert found.security.allowed_origins == ("https://a.example",)
    assert serve("--config", str(file), "--no-allow-forced-lengths").allow_forced_lengths is False


def test_a_variable_of_one_command_goes_before_the_one_of_all(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KENDALL_PORT", "9001")
    monkeypatch.setenv("KENDALL_SERVE_PORT", "9002")
    monkeypatch.setenv("KENDALL_LOAD_PORT", "9003")
    assert serve().port == 9002


def test_a_bound_of_zero_is_none(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (
        serve().overload.max_num_queued_reqs == OverloadSettings().max_num_queued_reqs == MAX_QUEUED
    )
    assert serve("--max-num-queued-reqs", "0").overload.max_num_queued_reqs is None
    file = tmp_path / "kendall.toml"
    file.write_text("max-num-queued-reqs = 0\nmax_sequences_per_call = 7\n")
    filed = serve("--config", str(file)).overload
    assert (filed.max_num_queued_reqs, filed.max_sequences_per_call) == (None, 7)
    monkeypatch.setenv("KENDALL_MAX_NUM_QUEUED_REQS", "5")
    assert serve("--config", str(file)).overload.max_num_queued_reqs == 5


OPTIONS: dict[
    str, tuple[tuple[str, ...], str, object]
] = {  # of `serve`: arguments, where they arrive, as what
    "model": (("there",), "model", "there"),
    "host": (("--host", "localhost"), "host", "localhost"),
    "port": (("--port", "9001"), "port", 9001),
    "served_model_name": (("--served-model-name", "big"), "served_model_name", "big"),
    "unknown_fields": (("--unknown-fields", "ignore"), "unknown_fields", "ignore"),
    "policy": (("--policy", "single"), "policy", "single"),
    "length_predictor": (("--length-predictor", "history"), "length_predictor", "history"),
    "replicas": (("--replicas", "3"), "replicas", 3),
    "max_output_tokens": (("--max-output-tokens", "77"), "max_output_tokens", 77),
    "patience": (("--patience", "7"), "patience", 7.0),
    "request_timeout": (("--request-timeout", "1500ms"), "request_timeout", 1.5),
    "first_token_timeout": (("--first-token-timeout", "7"), "first_token_timeout", 7.0),
    "priority_aging": (("--priority-aging", "7"), "overload.priority_aging", 7.0),
    "engine": (("--engine", "emulated"), "engine", "emulated"),
    "ray_address": (("--engine", "ray", "--ray-address", "auto"), "ray_address", "auto"),
    "engine_url": (
        ("--engine", "http", "--engine-url", "http://there:1"),
        "engine_url",
        ("http://there:1",),
    ),
    "engine_api_key": (
        ("--engine", "http", "--engine-url", "http://there:1", "--engine-api-key", "secret"),
        "engine_api_key",
        "secret",
    ),
    "tokenizer": (
        ("--engine", "http", "--engine-url", "http://there:1", "--tokenizer", "there"),
        "tokenizer",
        Path("there"),
    ),
    "max_num_seqs": (("--max-num-seqs", "7"), "engine_args", {"max_num_seqs": 7}),
    "max_model_len": (("--max-model-len", "77"), "engine_args", {"max_model_len": 77}),
    "engine_arg": (("--engine-arg", "seed=7"), "engine_args", {"seed": "7"}),
    "enable_auto_tool_choice": (
        ("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        "enable_auto_tool_choice",
        True,
    ),
    "tool_call_parser": (("--tool-call-parser", "hermes"), "tool_call_parser", "hermes"),
    "reasoning_parser": (("--reasoning-parser", "qwen3"), "reasoning_parser", "qwen3"),
    "start_timeout": (("--start-timeout", "7"), "supervision.start_timeout", 7.0),
    "max_restarts": (("--max-restarts", "7"), "supervision.max_restarts", 7),
    "restart_window": (("--restart-window", "7"), "supervision.restart_window", 7.0),
    "restart_timeout": (("--restart-timeout", "7"), "supervision.restart_timeout", 7.0),
    "max_interruptions": (("--max-interruptions", "7"), "supervision.max_interruptions", 7),
    "suspect_after": (("--suspect-after", "7"), "supervision.suspect_after", 7),
    "max_parked": (("--max-parked", "7"), "supervision.max_parked", 7),
    "stuck_timeout": (("--stuck-timeout", "7"), "supervision.stuck_timeout", 7.0),
    "shutdown_delay": (("--shutdown-delay", "7"), "shutdown_delay", 7.0),
    "shutdown_timeout": (("--shutdown-timeout", "7"), "shutdown_timeout", 7.0),
    "latency": (("--latency", "reference"), "latency", "reference"),
    "calibrate": (("--calibrate",), "calibrate", True),
    "idle_probes": (("--idle-probes",), "idle_probes", True),
    "prediction_interval": (("--prediction-interval", "7"), "prediction_interval", 7.0),
    "what_if_interval": (("--what-if-interval", "7"), "what_if_interval", 7.0),
    "prediction_window": (("--prediction-window", "77"), "prediction_window", 77.0),
    "state_file": (("--state-file", "state.json"), "state_file", Path("state.json")),
    "autopilot": (("--autopilot", "advise"), "autopilot", "advise"),
    "autopilot_policies": (("--autopilot-policies", "single"), "autopilot_policies", ("single",)),
    "reserved_tokens": (("--reserved-tokens", "7"), "reserved_tokens", 7),
    "max_clipped_fraction": (("--max-clipped-fraction", "0.07"), "max_clipped_fraction", 0.07),
    "max_num_queued_reqs": (("--max-num-queued-reqs", "7"), "overload.max_num_queued_reqs", 7),
    "max_sequences_per_call": (
        ("--max-sequences-per-call", "7"),
        "overload.max_sequences_per_call",
        7,
    ),
    "max_num_queued_tokens": (
        ("--max-num-queued-tokens", "7"),
        "overload.max_num_queued_tokens",
        7,
    ),
    "slo": (("--slo", "mean_queueing_delay=7s"), "overload.slo", "mean_queueing_delay=7s"),
    "adaptive_concurrency": (("--adaptive-concurrency",), "overload.adaptive_concurrency", True),
    "rate_limit": (("--rate-limit", "7"), "overload.rate_limit", 7.0),
    "rate_limit_tokens": (("--rate-limit-tokens", "7"), "overload.rate_limit_tokens", 7.0),
    "rate_limit_burst": (("--rate-limit-burst", "7"), "overload.rate_limit_burst", 7.0),
    "overload_status": (("--overload-status", "503"), "overload.overload_status", 503),
    "queue_events": (("--queue-events",), "overload.queue_events", True),
    "sse_keep_alive_interval": (
        ("--sse-keep-alive-interval", "7"),
        "overload.sse_keep_alive_interval",
        7.0,
    ),
    "slow_reader_timeout": (("--slow-reader-timeout", "7"), "supervision.slow_reader_timeout", 7.0),
    "wait_estimates": (("--no-wait-estimates",), "overload.wait_estimates", False),
    "api_key": (
        ("--api-key", "a-key-of-some-length"),
        "security.api_keys",
        read_keys("--api-key", ["a-key-of-some-length"], None),
    ),
    "admin_key": (
        ("--admin-key", "a-key-of-some-length"),
        "security.admin_keys",
        read_keys("--admin-key", ["a-key-of-some-length"], None),
    ),
    "allow_unauthenticated": (("--allow-unauthenticated",), "security.allow_unauthenticated", True),
    "metrics_need_key": (
        ("--metrics-need-key", "--api-key", "a-key-of-some-length"),
        "security.metrics_need_key",
        True,
    ),
    "max_body_bytes": (("--max-body-bytes", "7777"), "security.max_body_bytes", 7777),
    "max_prompt_tokens": (("--max-prompt-tokens", "7"), "security.max_prompt_tokens", 7),
    "max_form_bytes": (("--max-form-bytes", "777"), "security.max_form_bytes", 777),
    "max_form_compile_time": (
        ("--max-form-compile-time", "7"),
        "security.max_form_compile_time",
        7.0,
    ),
    "max_connections_per_address": (
        ("--max-connections-per-address", "7"),
        "security.max_connections_per_address",
        7,
    ),
    "allowed_origins": (
        ("--allowed-origins", '["https://a.example"]'),
        "security.allowed_origins",
        ("https://a.example",),
    ),
    "record_file": (("--record-file", "records.jsonl"), "record_file", Path("records.jsonl")),
    "otlp_traces_endpoint": (
        ("--otlp-traces-endpoint", "http://a:4317"),
        "otlp_traces_endpoint",
        "http://a:4317",
    ),
    "log_level": (("--log-level", "debug"), "logs.level", "debug"),
    "log_format": (("--log-format", "json"), "logs.format", "json"),
    "log_prompts": (("--log-prompts",), "logs.prompts", True),
    "allow_forced_lengths": (("--allow-forced-lengths",), "allow_forced_lengths", True),
}
OF_FILES = {
    "api_key_file",
    "admin_key_file",
    "ssl_keyfile",
    "ssl_certfile",
    "ssl_ca_certs",
}  # that have to be there
# the modules are kept in the environment
NO_SETTINGS = {"config", "policy_module", "show_config", "json_output"}


def field_of(settings: Settings, path: str) -> object:
    return reduce(getattr, path.split("."), settings)


@pytest.mark.parametrize("option", OPTIONS)
def test_the_value_of_an_option_arrives_in_its_field(
    option: str, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value that is not the default, which the field has without it."""
    monkeypatch.chdir(tmp_path)
    arguments, path, value = OPTIONS[option]
    assert field_of(serve(), path) != value
    assert field_of(serve(*arguments), path) == value


def test_the_files_of_options_arrive_in_their_fields(serve: Serve, tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    api, admin = tmp_path / "api", tmp_path / "admin"
    api.write_text("a-key-of-some-length\n")
    admin.write_text("another-key-of-some-length\n")
    files = {
        "api_key_file": api,
        "admin_key_file": admin,
        "ssl_keyfile": key,
        "ssl_certfile": certificate,
        "ssl_ca_certs": certificate,
    }
    assert set(files) == OF_FILES
    found = serve(
        *(
            part
            for option, file in files.items()
            for part in (f"--{option.replace('_', '-')}", str(file))
        )
    ).security
    assert (found.api_keys, found.admin_keys) == (
        read_keys("--api-key", [], api),
        read_keys("--admin-key", [], admin),
    )
    assert found.tls == TlsSettings(keyfile=key, certfile=certificate, ca_certs=certificate)
    assert found.key_files == (api, admin, key)


def test_every_option_is_followed_to_its_field() -> None:
    options = set(inspect.signature(cli.serve_command).parameters) - {"ctx"}
    assert options == set(OPTIONS) | OF_FILES | NO_SETTINGS


def test_settings_are_frozen() -> None:
    settings = Settings(model="tiny", served_model_name="tiny")
    for part in (
        settings,
        settings.security,
        settings.logs,
        settings.security.tls,
        settings.overload,
        settings.supervision,
    ):
        with pytest.raises(AttributeError):
            part.anything = 1  # type: ignore[union-attr]


# what is wrong


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("polcy = 'single'", ("got key 'polcy'", "did you mean 'policy'?")),
        ("max_output_token = 5", ("did you mean 'max-output-tokens'?",)),
        ("zzz = 5", ("got key 'zzz'", "expected an option of `kendall serve`")),
        ("port = 'eighty'", ("got port = 'eighty'", "expected a whole number")),
        ("port = '8080'", ("expected a whole number",)),
        ("port = true", ("got port = True", "expected a whole number")),
        ("port = 8080.5", ("expected a whole number",)),
        ("port = 70000", ("70000", "kendall.toml")),
        ("patience = true", ("expected a number of seconds, or a duration in quotes",)),
        (
            "patience = '5 parsecs'",
            ("got --patience '5 parsecs' from", "kendall.toml", "expected a duration"),
        ),
        ("patience = 0", ("got --patience 0 from", "kendall.toml", "at least 0.001 s")),
        ("host = 5", ("expected a text in quotes",)),
        ("record-file = 5", ("expected a path in quotes",)),
        ("calibrate = 1", ("expected true or false",)),
        ("calibrate = 'yes'", ("expected true or false",)),
        ("autopilot-policies = [1]", ("expected a list of texts",)),
        ("policy = ['single']", ("expected a text in quotes",)),
        ("port = 1\nport = 2", ("expected a readable TOML file",)),
        ("max-num-seqs = 1\nmax_num_seqs = 2", ("twice",)),
        ("[serve]\nport = 1", ("got table [serve]", "top level")),
        ("[engine_arg]\nseed = 1", ("got table [engine_arg]", "[engine-args]")),
        ("engine-arg = ['seed=1']", ("expected the table [engine-args]",)),
        ("engine-args = 5", ("expected a table",)),
        ("show-config = true", ("got key 'show-config'",)),
        ("config = 'other.toml'", ("got key 'config'",)),
        ("log-level = 'infos'", ("got --log-level 'infos'", "did you mean 'info'?")),
        ("log-format = 'xml'", ("got --log-format 'xml'", "text or json")),
        ("engine = 'vlm'", ("expected auto, vllm, emulated, http or ray",)),
        ("unknown-fields = 'ignor'", ("got --unknown-fields 'ignor'", "expected refuse or ignore")),
        ("allowed-origins = [1]", ("JSON list of origins",)),
        ("api-key = 5", ("expected a list of texts",)),
        ("api-key = ['two words']", ("printable ASCII",)),
        ("host = '0.0.0.0'", ("--allow-unauthenticated",)),
        ("metrics-need-key = true", ("--metrics-need-key without a key",)),
    ],
)
def test_a_file_that_is_wrong_is_one_line_that_says_what_to_do(
    text: str, words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kendall.toml"
    file.write_text(text)
    said = complaint(capsys, "serve", "--config", str(file), "--show-config")
    for word in words:
        assert word in said


def test_a_file_that_is_not_there_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "expected a readable TOML file" in complaint(
        capsys, "serve", "--config", str(tmp_path / "nowhere.toml")
    )
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    assert "expected a readable TOML file" in complaint(
        capsys, "serve", "--config", str(tmp_path / "bytes.toml")
    )


def test_a_secret_of_the_wrong_type_is_not_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kendall.toml"
    file.write_text("api-key = ['sk-secret', 5]")
    assert "sk-secret" not in complaint(capsys, "serve", "--config", str(file))


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("KENDALL_POLCY", "single", ("got KENDALL_POLCY", "did you mean 'KENDALL_POLICY'?")),
        ("KENDALL_SERVE_POLCY", "single", ("did you mean 'KENDALL_SERVE_POLICY'?",)),
        ("KENDALL_XYZZY", "1", ("got KENDALL_XYZZY",)),
        (
            "KENDALL_PORT",
            "eighty",
            ("got --port 'eighty' from KENDALL_PORT", "expected a whole number from 0 to 65535"),
        ),
        (
            "KENDALL_CALIBRATE",
            "perhaps",
            ("got --calibrate 'perhaps' from KENDALL_CALIBRATE", "expected true or false"),
        ),
    ],
)
def test_a_variable_that_is_wrong_is_one_line(
    variable: str,
    value: str,
    words: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, value)
    said = complaint(capsys, "serve", "--show-config")
    for word in words:
        assert word in said


def test_variables_of_other_commands_and_of_our_own_are_known(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in (
        "KENDALL_REQUEST_RATE",
        "KENDALL_LOAD_MODEL",
        "KENDALL_DEBUG",
        "KENDALL_FLAVOUR",
        "KENDALL_ENGINE_CPUS",
        "KENDALL_JSON",
    ):
        monkeypatch.setenv(variable, "1")
    assert serve().port == 8080


def test_what_kubernetes_sets_for_a_service_named_kendall_is_passed_over(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every pod of a namespace gets variables of its services: KENDALL_PORT is then an address."""
    links = {
        "KENDALL_PORT": "tcp://10.0.0.1:8080",
        "KENDALL_SERVICE_HOST": "10.0.0.1",
        "KENDALL_SERVICE_PORT": "8080",
        "KENDALL_SERVICE_PORT_HTTP": "8080",
        "KENDALL_PORT_8080_TCP": "tcp://10.0.0.1:8080",
        "KENDALL_PORT_8080_TCP_PROTO": "tcp",
        "KENDALL_PORT_8080_TCP_ADDR": "10.0.0.1",
        "KENDALL_PORT_8080_TCP_PORT": "8080",
        "KENDALL_GATEWAY_PORT": "tcp://10.0.0.2:80",
    }
    for variable, value in links.items():
        monkeypatch.setenv(variable, value)
    assert serve().port == 8080


# one variable, several commands


def test_options_of_one_name_mean_the_same_in_every_command_or_have_variables_of_their_own() -> (
    None
):
    kinds: dict[str, dict[str, set[str]]] = {}
    for name in kendall.cli.COMMANDS:
        for parameter in kendall.cli.command_of(name).params:
            if parameter.envvar:
                kind = str(parameter.type_descriptor.annotation).replace(
                    "list[str]", "<class 'str'>"
                )
                kinds.setdefault(parameter.envvar, {}).setdefault(kind, set()).add(name)
    clashes = {variable: found for variable, found in kinds.items() if len(found) > 1}
    assert clashes == {}


def option_of(variable: str, parameter: Any) -> str:
    """The name of the parameter that the variable spells: `sweep --output` is `--result-dir`
    too.
    """
    names = [opt.removeprefix("--") for opt in parameter.opts if opt.startswith("--")] or [
        key_of(parameter)
    ]
    return max(
        (name for name in names if variable.endswith("_" + name.replace("-", "_").upper())), key=len
    )


def test_every_variable_stands_for_one_option() -> None:
    """Of whatever command; none of them for what an option does not set, such as the
    installation of completions.
    """
    options: dict[str, set[str]] = {}
    for name in kendall.cli.COMMANDS:
        for parameter in kendall.cli.command_of(name).params:
            for variable in kendall.cli.variables_of(name, parameter) if parameter.envvar else ():
                options.setdefault(variable, set()).add(option_of(variable, parameter))
    assert {variable: names for variable, names in options.items() if len(names) > 1} == {}
    assert set(options).isdisjoint(kendall.cli.NO_OPTIONS)
    assert not any("COMPLETION" in variable for variable in options)


def test_a_variable_with_a_meaning_of_its_own_in_a_command_is_read_only_in_its_long_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`sweep --slo` is what a search looks for; elsewhere KENDALL_SLO is the objective: `serve`
    admits by it, `advise` weighs by it.
    """
    for name, options in kendall.cli.OTHER_MEANING.items():
        for parameter in kendall.cli.command_of(name).params:
            if key_of(parameter) in options:
                variables = kendall.cli.variables_of(name, parameter)
                assert (
                    variables[0] == f"KENDALL_{name}_{key_of(parameter)}".replace("-", "_").upper()
                )
                assert f"KENDALL_{key_of(parameter)}".replace("-", "_").upper() not in variables
                assert len(kendall.cli.variables_of("other", parameter)) == len(variables) + 1
    with_slo = {
        name
        for name in kendall.cli.COMMANDS
        if "slo" in map(key_of, kendall.cli.command_of(name).params)
    }
    own = {name for name in with_slo if "slo" in kendall.cli.OTHER_MEANING.get(name, ())}
    assert with_slo - own == {"serve", "optimize", "advise", "plan", "predict", "simulate"}
    assert own == {"sweep", "load", "summary", "watch"}


def test_the_objective_of_the_environment_is_one_for_serve_advise_and_optimize(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KENDALL_SLO", "p99_queueing_delay=2s")
    assert serve().overload.slo == "p99_queueing_delay=2s"
    assert serve("--slo", "p90_queueing_delay=1s").overload.slo == "p90_queueing_delay=1s"
    monkeypatch.setenv("KENDALL_SERVE_SLO", "mean_queueing_delay=3s")
    assert serve().overload.slo == "mean_queueing_delay=3s"
    monkeypatch.delenv("KENDALL_SERVE_SLO")
    monkeypatch.setenv("KENDALL_SLO", "p99.9_sojourn_time=2s")
    assert serve().overload.slo == "p99.9_sojourn_time=2s"
    monkeypatch.setenv("KENDALL_SLO", "p99_sojourn=2s")
    assert complaint(capsys, "serve").endswith("(--slo came from KENDALL_SLO)")
    assert "KENDALL" not in complaint(capsys, "serve", "--slo", "nonsense")
    monkeypatch.setenv("KENDALL_SLO", "p99_sojourn_time=2s")
    assert "no answer from" in complaint(capsys, "advise", "http://127.0.0.1:9", code=1)


def test_several_names_or_keys_stand_in_one_variable_with_spaces_between(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KENDALL_SERVED_MODEL_NAME", "big small")
    monkeypatch.setenv("KENDALL_API_KEY", "sk-1 sk-2")
    found = serve()
    assert (found.served_model_name, found.served_model_aliases, len(found.security.api_keys)) == (
        "big",
        ("small",),
        2,
    )
    assert serve("--served-model-name", "one").served_model_aliases == ()
    said = complaint(capsys, "advise", "http://127.0.0.1:9")
    assert (
        "got several keys in KENDALL_API_KEY; expected a single key to send: "
        "set KENDALL_ADVISE_API_KEY too" in said
    )
    assert "sk-1" not in said
    assert "no answer from" in complaint(
        capsys, "advise", "http://127.0.0.1:9", "--api-key", "sk-1", code=1
    )
    monkeypatch.setenv("KENDALL_ADVISE_API_KEY", "sk-1")
    monkeypatch.setenv("KENDALL_SLO", "p99_sojourn_time=2s")
    assert "no answer from" in complaint(capsys, "advise", "http://127.0.0.1:9", code=1)


@pytest.mark.parametrize(
    ("flag", "variable", "toml", "value", "source"),
    [
        ("--no-wait-estimates", None, None, False, "--no-wait-estimates"),
        ("--wait-estimates", "false", None, True, "--wait-estimates"),
        (None, "0", None, False, "KENDALL_WAIT_ESTIMATES"),
        (None, "true", "false", True, "KENDALL_WAIT_ESTIMATES"),
        (None, None, "false", False, "kendall.toml"),
        ("--wait-estimates", None, "false", True, "--wait-estimates"),
    ],
)
def test_what_is_on_unless_it_is_said_can_be_switched_off_in_every_layer(
    flag: str | None,
    variable: str | None,
    toml: str | None,
    value: bool,
    source: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [] if flag is None else [flag]
    if variable is not None:
        monkeypatch.setenv("KENDALL_WAIT_ESTIMATES", variable)
    if toml is not None:
        (tmp_path / "kendall.toml").write_text(f"wait-estimates = {toml}\n")
        arguments += ["--config", str(tmp_path / "kendall.toml")]
    found = json.loads(shown(capsys, *arguments, "--json"))["wait-estimates"]
    assert found["value"] is value
    assert found["source"].endswith(source)


def test_the_negative_form_of_a_switch_has_no_variable_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two variables for one switch could contradict each other."""
    monkeypatch.setenv("KENDALL_NO_WAIT_ESTIMATES", "1")
    assert "got KENDALL_NO_WAIT_ESTIMATES" in complaint(capsys, "serve")
    assert "did you mean 'KENDALL_WAIT_ESTIMATES'?" in complaint(capsys, "serve")


def test_a_variable_that_was_meant_for_serve_does_not_stop_advise_or_optimize(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`serve` and `advise` both read KENDALL_MAX_CLIPPED_FRACTION, `advise` only for some
    objectives; a flag is an error there.
    """
    monkeypatch.setenv("KENDALL_MAX_CLIPPED_FRACTION", "0.02")
    monkeypatch.setenv("KENDALL_SLO", "p99_queueing_delay=2s")
    law = (
        "--arrival-rate",
        "5",
        "--output-tokens",
        "deterministic:value=10",
        "--latency",
        "a=0.001,c=0.01",
    )
    assert (
        status(
            "optimize", "--target", "policy", "--objective", "delay", "--candidates", "single", *law
        )
        == 0
    )
    assert "no answer from" in complaint(
        capsys, "advise", "http://127.0.0.1:9", "--objective", "v1", code=1
    )
    said = complaint(
        capsys,
        "advise",
        "http://127.0.0.1:9",
        "--objective",
        "v1",
        "--max-clipped-fraction",
        "0.02",
    )
    assert "max_clipped_fraction with the objective v1" in said
    said = complaint(
        capsys, "optimize", "--target", "policy", "--objective", "delay", "--loss-cost", "2", *law
    )
    assert "--loss-cost with --objective delay" in said


def test_a_flag_that_says_when_requests_come_wins_over_a_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """They exclude one another: two flags are an error, a flag and a variable are not."""
    monkeypatch.setenv("KENDALL_REQUEST_RATE", "5")
    monkeypatch.setenv("KENDALL_BURSTINESS", "2")
    nowhere = str(tmp_path / "nowhere.jsonl")
    said = complaint(
        capsys, "load", "--base-url", "http://127.0.0.1:9", "--model", "m", "--trace", nowhere
    )
    assert "nowhere.jsonl" in said
    assert "--request-rate" not in said
    monkeypatch.delenv("KENDALL_REQUEST_RATE")
    said = complaint(
        capsys,
        "load",
        "--base-url",
        "http://127.0.0.1:9",
        "--model",
        "m",
        "--trace",
        nowhere,
        "--request-rate",
        "5",
    )
    assert "--request-rate and --trace" in said


def test_a_gateway_that_is_measured_does_not_read_the_variables_of_who_measures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kendall.loadgen.gateway.gateway_process import own_environment

    for variable in (
        "KENDALL_PATIENCE",
        "KENDALL_MAX_OUTPUT_TOKENS",
        "KENDALL_API_KEY",
        "KENDALL_DEBUG",
    ):
        monkeypatch.setenv(variable, "1")
    assert {name for name in own_environment() if name.startswith("KENDALL_")} == {"KENDALL_DEBUG"}
    assert "PATH" in own_environment()


# --show-config


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert status("serve", *arguments, "--show-config") == 0
    return capsys.readouterr().out


def test_show_config_names_each_setting_with_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kendall.toml"
    file.write_text("patience = 5\n[engine-args]\nseed = 7\n")
    monkeypatch.setenv("KENDALL_PORT", "9001")
    arguments = (
        "--config",
        str(file),
        "--policy",
        "capped:max_batch_size=08",
        "--engine-arg",
        "dtype=float32",
    )
    found = json.loads(shown(capsys, *arguments, "--json"))
    assert found["patience"] == {"value": 5.0, "source": str(file)}
    assert found["port"] == {"value": 9001, "source": "KENDALL_PORT"}
    assert found["policy"] == {"value": "capped:max_batch_size=8", "source": "--policy"}
    assert found["host"] == {"value": "127.0.0.1", "source": "default"}
    assert found["max-output-tokens"] == {"value": None, "source": "default"}
    assert found["engine-args"] == {
        "seed": {"value": 7, "source": str(file)},
        "dtype": {"value": "float32", "source": "--engine-arg"},
    }
    assert {"config", "show-config", "json", "engine-arg"}.isdisjoint(found)
    text = shown(capsys, *arguments)
    assert f"patience = 5.0  # {file}" in text
    assert "# max-output-tokens is not set" in text


def test_show_config_has_an_engine_argument_with_an_option_of_its_own_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The option is in force."""
    arguments = ("--engine-arg", "max_num_seqs=3", "--engine-arg", "seed=7", "--max-num-seqs", "4")
    found = json.loads(shown(capsys, *arguments, "--json"))
    assert found["max-num-seqs"]["value"] == 4
    assert set(found["engine-args"]) == {"seed"}


def test_show_config_writes_a_table_within_a_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, table = tmp_path / "kendall.toml", {"a b": 1, "c": {"d": [True, "x"]}}
    file.write_text('[engine-args]\nhf_overrides = { "a b" = 1, c = { d = [true, "x"] } }\n')
    again = tomllib.loads(shown(capsys, "--config", str(file)))
    assert again["engine-args"] == {"hf_overrides": table}


def test_show_config_can_be_fed_back(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        *(
            "here/it is",
            "--policy",
            "fixed:batch_size=4,max_wait=0.5",
            "--patience",
            "2.5",
            "--calibrate",
            "--max-num-seqs",
            "3",
        ),
        *(
            "--autopilot-policies",
            "single",
            "--autopilot-policies",
            "dynamic",
            "--allowed-origins",
            '["https://a.example"]',
        ),
        *(
            "--record-file",
            'odd "name"\\n.jsonl',
            "--engine-arg",
            "block_size=16",
            "--log-format",
            "json",
            "--max-body-bytes",
            "4096",
        ),
        *(
            "--served-model-name",
            "big",
            "--served-model-name",
            "small",
            "--slo",
            "p99_queueing_delay=500ms",
            "--no-wait-estimates",
        ),
        *(
            "--max-form-bytes",
            "4096",
            "--max-form-compile-time",
            "500ms",
            "--max-connections-per-address",
            "9",
        ),
        *(
            "--queue-events",
            "--rate-limit",
            "0.5",
            "--rate-limit-burst",
            "4",
            "--overload-status",
            "503",
            "--stuck-timeout",
            "0",
        ),
    ]
    file = tmp_path / "kendall.toml"
    file.write_text(shown(capsys, *arguments))
    tomllib.loads(file.read_text())
    assert serve("--config", str(file)) == serve(*arguments)
    (tmp_path / "defaults.toml").write_text(shown(capsys))
    assert serve("--config", str(tmp_path / "defaults.toml")) == serve()


def test_show_config_shows_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kendall.toml"
    file.write_text('api-key = ["sk-in-the-file"]\n[engine-args]\nhf_token = "hf-in-the-file"\n')
    monkeypatch.setenv("KENDALL_ADMIN_KEY", "sk-in-the-environment")
    for more in ((), ("--json",)):
        text = shown(capsys, "--config", str(file), "--metrics-need-key", *more)
        for secret in ("sk-in-the-file", "hf-in-the-file", "sk-in-the-environment"):
            assert secret not in text
        assert "***" in text
        assert "KENDALL_ADMIN_KEY" in text
        if more:
            assert json.loads(text)["metrics-need-key"]["value"] is True
        else:
            assert {"api-key", "admin-key"}.isdisjoint(tomllib.loads(text))


SHOWN = [
    Shown("port", 8080, "default"),
    Shown("patience", None, "default"),
    Shown("calibrate", True, "--calibrate"),
    Shown("what-if-interval", math.inf, "FILE"),
    Shown("record-file", 'a "b"/é\x7f', "KENDALL_RECORD_FILE"),
    Shown("engine-url", ["http://a", "http://b"], "FILE"),
    Shown("api-key", ["sk-1"], "--api-key"),
    Shown("api-key-file", "keys", "--api-key-file"),
    Shown("max_num_seqs", 4, "FILE", engine=True),
    Shown("hf_token", "secret", "--engine-arg", engine=True),
    Shown("overrides", {"a": [1, 2.5], "b c": False}, "FILE", engine=True),
]


def test_what_is_shown_is_a_file_for_config() -> None:
    assert as_toml(SHOWN) == (
        "# kendall serve --config FILE: each setting with its source; secrets are left out\n"
        "port = 8080  # default\n"
        "# patience is not set\n"
        "calibrate = true  # --calibrate\n"
        "what-if-interval = inf  # FILE\n"
        'record-file = "a \\"b\\"/é\\u007f"  # KENDALL_RECORD_FILE\n'
        'engine-url = ["http://a", "http://b"]  # FILE\n'
        "# api-key = ***  # --api-key\n"
        'api-key-file = "keys"  # --api-key-file\n'
        "\n"
        "[engine-args]\n"
        "max_num_seqs = 4  # FILE\n"
        "# hf_token = ***  # --engine-arg\n"
        'overrides = {"a" = [1, 2.5], "b c" = false}  # FILE\n'
    )
    assert as_toml(SHOWN[:2]).endswith("# patience is not set\n"), "no table without arguments"
    table = tomllib.loads(as_toml(SHOWN))
    assert table["engine-args"] == {"max_num_seqs": 4, "overrides": {"a": [1, 2.5], "b c": False}}


def test_what_is_shown_as_json_has_each_value_with_its_source() -> None:
    found = json.loads(as_json(SHOWN))
    assert found["port"] == {"value": 8080, "source": "default"}
    assert found["patience"] == {"value": None, "source": "default"}
    assert found["what-if-interval"] == {"value": "inf", "source": "FILE"}
    assert found["api-key"] == {"value": "***", "source": "--api-key"}
    assert found["engine-args"] == {
        "max_num_seqs": {"value": 4, "source": "FILE"},
        "hf_token": {"value": "***", "source": "--engine-arg"},
        "overrides": {"value": {"a": [1, 2.5], "b c": False}, "source": "FILE"},
    }


@pytest.mark.parametrize(
    ("key", "value", "secret"),
    [
        ("api-key", "sk", True),
        ("admin_key", ["sk"], True),
        ("hf_token", "x", True),
        ("db-Password", "x", True),
        ("client-secret", "x", True),
        ("api-key", "", False),  # none
        ("api-key", [], False),
        ("api-key-file", "keys", False),
        ("metrics-need-key", True, False),  # a switch
        ("max-tokens", "5", False),
        ("keyboard", "x", False),
    ],
)
def test_a_secret_is_a_text_under_the_name_of_one(key: str, value: object, secret: bool) -> None:
    assert is_secret(key, value) is secret


def test_json_belongs_to_show_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--json without --show-config" in complaint(capsys, "serve", "--json")


# logs


def record_of(**more: Any) -> logging.LogRecord:
    record = logging.LogRecord("kendall", logging.WARNING, __file__, 1, "got %s", ("it",), None)
    record.__dict__.update(more)
    return record


def test_a_json_log_line_is_one_object_with_time_level_logger_message_and_extras() -> None:
    found = json.loads(
        JsonFormatter().format(record_of(request_id="r1", seconds=0.5, odd={1, 2}, message="x\ny"))
    )
    assert found["time"].endswith("Z")
    assert (found["level"], found["logger"], found["message"]) == ("warning", "kendall", "got it")
    assert (found["request_id"], found["seconds"]) == ("r1", 0.5)
    assert isinstance(found["odd"], str), "what JSON cannot say is written as text"
    assert set(found) == {"time", "level", "logger", "message", "request_id", "seconds", "odd"}


def test_an_exception_in_a_json_log_is_one_line() -> None:
    try:
        int("two\nlines")
    except ValueError as error:
        record = record_of(exc_info=(type(error), error, error.__traceback__))
    line = JsonFormatter().format(record)
    assert "\n" not in line
    assert "ValueError: invalid literal" in json.loads(line)["exception"]


def test_vllm_logs_in_the_same_form(capsys: pytest.CaptureFixture[str]) -> None:
    """In its own processes too: it reads a configuration file, which names our formatter."""
    import logging.config

    before = (
        logging.getLogger("vllm").handlers[:],
        logging.getLogger("vllm").propagate,
        logging.getLogger("vllm").level,
    )
    try:
        logging.config.dictConfig(json.loads(json.dumps(vllm_configuration("INFO"))))
        logging.getLogger("vllm.engine").info("began")
        found = json.loads(capsys.readouterr().err)
        assert (found["logger"], found["message"], found["level"]) == (
            "vllm.engine",
            "began",
            "info",
        )
    finally:
        logging.getLogger("vllm").handlers, logging.getLogger("vllm").propagate = before[:2]
        logging.getLogger("vllm").setLevel(before[2])


def test_the_file_for_vllm_is_written_once_and_the_operators_own_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import os

    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    monkeypatch.setattr(logs.atexit, "register", lambda remove: remove)
    monkeypatch.setattr(logs, "_writers", [])
    monkeypatch.setattr(logging.getLogger("vllm"), "level", logging.getLogger("vllm").level)
    monkeypatch.setenv(logs.VLLM_CONFIGURATION, "theirs.json")
    logs.configure_logs(LogSettings(format="json"))
    assert os.environ[logs.VLLM_CONFIGURATION] == "theirs.json"
    monkeypatch.delenv(logs.VLLM_CONFIGURATION)
    logs.configure_logs(LogSettings())
    assert logs.VLLM_CONFIGURATION not in os.environ
    logs.configure_logs(LogSettings(format="json"))
    file = Path(os.environ.pop(logs.VLLM_CONFIGURATION))
    assert json.loads(file.read_text())["loggers"]["vllm"]["handlers"] == ["stderr"]
    file.unlink()


def test_levels_and_formats_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, value, expected in (
        ("--log-level", "warn", "debug, info, warning or error; did you mean 'warning'?"),
        ("--log-format", "yaml", "text or json"),
    ):
        with pytest.raises(SystemExit) as stop:
            kendall.cli.main(["serve", flag, value])
        assert stop.value.code == 2
        assert capsys.readouterr().err == f"kendall: got {flag} {value!r}; expected {expected}\n"


@pytest.mark.parametrize("option", ["--shutdown-timeout", "--shutdown-delay"])
def test_a_shutdown_has_an_end(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        kendall.cli.main(["serve", option, "inf", "--show-config"])
    assert stop.value.code == 2
    assert f"got {option} inf; expected a duration" in capsys.readouterr().err


def test_an_endless_duration_is_shown_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        kendall.cli.main(["serve", "--patience", "inf", "--show-config", "--json"])
    assert stop.value.code == 0

    def refused(constant: str) -> float:
        raise AssertionError(constant)

    shown = json.loads(capsys.readouterr().out, parse_constant=refused)
    assert shown["patience"]["value"] == "inf"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--max-clipped-fraction", "1"), "max-clipped-fraction"),
        (("--max-clipped-fraction", "-0.1"), "max-clipped-fraction"),
        (("--max-connections-per-address", "0"), "max-connections-per-address"),
        (("--max-sequences-per-call", "0"), "max-sequences-per-call"),
    ],
)
def test_what_is_outside_of_an_options_range_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    assert says in complaint(capsys, "serve", *arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--max-clipped-fraction", "0.999"),
        ("--max-clipped-fraction", "0"),
        ("--max-connections-per-address", "1"),
        ("--max-sequences-per-call", "1"),
    ],
)
def test_the_ends_of_an_options_range_are_taken(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    name, value = arguments[0].removeprefix("--"), float(arguments[1])
    assert f"{name} = {value:g}" in shown(capsys, *arguments).replace(".0 ", " ")
