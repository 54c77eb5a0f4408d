"""A model folder that cannot be served is one line before vLLM starts, and before the gateway
listens.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kendall.policies.text import SpecError
from kendall.server.engines import hugging_face
from kendall.server.engines.base import EngineStartError
from kendall.server.engines.checkouts import write_weights
from kendall.server.engines.folder import config_of, safetensors_header, weight_files
from kendall.server.engines.vllm.engine import VllmEngine

LLAMA = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(30)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a model with 30 layers."""
    made = tmp_path / "own"
    made.mkdir()
    (made / "tokenizer.json").write_text("{}")
    configure(made, num_hidden_layers=30)
    hold(made, LLAMA)
    return made


def configure(folder: Path, **fields: Any) -> None:
    (folder / "config.json").write_text(json.dumps(fields))


def hold(folder: Path, names: Sequence[str]) -> None:
    write_weights(folder, dict.fromkeys(names, (1,)), [np.zeros(1, np.uint16) for _ in names])


def refusal(folder: Path, **engine_args: Any) -> str:
    with pytest.raises(SpecError) as caught:
        hugging_face.check_model(str(folder), engine_args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_whole_folder_passes(folder: Path) -> None:
    hugging_face.check_model(str(folder), {})


@pytest.mark.parametrize("says", [200, 5000, 12, "30"])
def test_layers_that_the_weights_do_not_hold_are_refused(says: object, folder: Path) -> None:
    configure(folder, num_hidden_layers=says)
    said = refusal(folder)
    assert said.startswith(f"got {says!r} layers in {folder}/config.json (num_hidden_layers); ")
    assert "expected the 30 that the weights hold" in said
    hugging_face.check_model(str(folder), {"hf_overrides": {"num_hidden_layers": 30}})
    hugging_face.check_model(str(folder), {"load-format": "dummy"})


def test_the_layers_of_several_files_are_counted_together(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    hold(folder, ["model.layers.30.mlp.up_proj.weight"])
    (folder / "model.safetensors").rename(folder / "model-00002-of-00002.safetensors")
    assert "expected the 31 that the weights hold" in refusal(folder)


@pytest.mark.parametrize(
    ("names", "config"),
    [
        (["transformer.wte.weight", "model.blocks.0.weight"], {"num_hidden_layers": 7}),
        (["transformer.h.0.weight", "transformer.h.1.weight"], {"num_hidden_layers": 2}),
        (["layers.0.weight"], {"num_hidden_layers": 1}),
        # parts of numbered blocks are no layers of the model
        (["encoder.block.0.layer.2.weight"], {"num_hidden_layers": 12}),
        # a tower of images may have more
        (["model.layers.0.weight", "vision.layers.9.weight"], {"num_hidden_layers": 1}),
        (["model.layers.0.weight"], {"text_config": {"num_hidden_layers": 1}}),
        # a layer that predicts more tokens comes behind the others
        (["model.layers.1.weight"], {"num_hidden_layers": 1, "num_nextn_predict_layers": 1}),
        (["model.layers.3.weight"], {"n_layer": 9}),
    ],
)
def test_names_and_configurations_of_other_models_pass(
    names: list[str], config: dict[str, Any], folder: Path
) -> None:
    configure(folder, **config)
    hold(folder, names)
    hugging_face.check_model(str(folder), {})


def test_weights_in_another_format_are_not_counted(folder: Path) -> None:
    configure(folder, num_hidden_layers=5000)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"weights")
    hugging_face.check_model(str(folder), {})


def test_a_folder_without_weights_is_refused_unless_they_are_asked_for_elsewhere(
    folder: Path,
) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "training_args.bin").touch()
    said = refusal(folder)
    assert said.startswith(f"got model '{folder}', a folder without weights (*.safetensors, ")
    assert "--engine-arg load_format=dummy" in said
    assert "a folder without weights" in refusal(folder, load_format="auto")
    for other in ("dummy", "runai_streamer"):
        hugging_face.check_model(str(folder), {"load_format": other})


def test_a_folder_without_a_tokenizer_names_the_option_that_takes_one(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    assert refusal(folder).endswith("; expected one, or --engine-arg tokenizer=PATH")
    hugging_face.check_model(str(folder), {"tokenizer": "elsewhere"})


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"a": 1,}', "line 1 column"),
        (b"", "Expecting value"),
        (b"\xff\xfe", "codec"),
        (b"[]", "another value"),
    ],
)
def test_a_file_that_is_no_json_is_named(
    name: str, content: bytes, reason: str, folder: Path
) -> None:
    (folder / name).write_bytes(content)
    said = refusal(folder)
    assert said.startswith(f"got {folder / name}, which cannot be read as a JSON object (")
    assert reason in said
    assert said.endswith("correct the file, or copy it again from the model's source")


def test_a_file_of_weights_that_is_not_whole_is_named(folder: Path) -> None:
    cut = (folder / "model.safetensors").read_bytes()[:-1]
    pointer = b"version https://git-lfs.github.com/spec/v1\n"
    for content in (pointer, b"", b"\x09\0\0\0\0\0\0\0{", cut):
        (folder / "model.safetensors").write_bytes(content)
        said = refusal(folder)
        assert said.startswith(f"got {folder}/model.safetensors, which ")
        assert said.endswith("; expected the whole file: fetch it again")


def test_mistrals_own_format_needs_no_config_json(folder: Path) -> None:
    (folder / "config.json").rename(folder / "params.json")
    hugging_face.check_model(str(folder), {})


def test_an_engine_that_is_started_elsewhere_looks_at_the_folder_itself(folder: Path) -> None:
    """As an actor on another machine does."""
    configure(folder, num_hidden_layers=31)

    async def main() -> None:
        with pytest.raises(EngineStartError, match="expected the 30 that the weights hold"):
            await VllmEngine(str(folder)).start()

    asyncio.run(main())  # a thread looks at it


def header_of(path: Path, header: object, data: int) -> dict[str, Any]:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * data)
    return safetensors_header(path)


def test_a_header_says_where_each_tensor_is_within_the_file(tmp_path: Path) -> None:
    path, tensor = (
        tmp_path / "w.safetensors",
        {"dtype": "F16", "shape": [2], "data_offsets": [0, 4]},
    )
    assert header_of(path, {"w": tensor, "__metadata__": {"format": "pt"}}, 4) == {"w": tensor}
    assert header_of(path, {"w": tensor}, 5) == {"w": tensor}
    assert header_of(path, {}, 0) == {}
    odd: dict[str, Any] = {"a": {"data_offsets": [9]}, "b": {"data_offsets": "x"}, "c": 5, "d": {}}
    assert header_of(path, odd, 0) == odd, "vLLM says what is wrong with it"
    for header in ({"w": tensor}, [tensor], 5):
        with pytest.raises(ValueError, match="is no whole safetensors file"):
            header_of(path, header, 3)
    path.unlink()
    with pytest.raises(ValueError, match=r"cannot be read as safetensors \(.*No such file"):
        safetensors_header(path)


def test_of_weights_in_several_formats_one_is_read(tmp_path: Path) -> None:
    names = ["pytorch_model.bin", "other.safetensors", "model-2.safetensors", "model-1.safetensors"]
    expected = [["pytorch_model.bin"], ["other.safetensors"], ["model-2.safetensors"]]
    assert weight_files(tmp_path) == []
    for name, found in zip(names, [*expected, sorted(names[2:])], strict=True):
        (tmp_path / name).touch()
        assert [path.name for path in weight_files(tmp_path)] == found


def test_the_text_model_of_a_configuration_is_read_in_place(tmp_path: Path) -> None:
    assert config_of(tmp_path) == {}
    configure(tmp_path, hidden_size=1, text_config={"hidden_size": 2})
    assert config_of(tmp_path)["hidden_size"] == 2
    configure(tmp_path, hidden_size=1, text_config=None)
    assert config_of(tmp_path)["hidden_size"] == 1
