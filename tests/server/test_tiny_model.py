"""The tiny model's folder: complete, the same everywhere, made once, and its tokenizer loses
nothing.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from kendall.queueing.errors import CommandError
from kendall.server.engines import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_tiny(tmp_path_factory.mktemp("models") / "tiny")


def test_every_id_has_a_text_and_no_two_ids_are_the_same_token(model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == tiny.VOCABULARY
    texts = [
        tokenizer.decode([number], skip_special_tokens=False) for number in range(tiny.VOCABULARY)
    ]
    assert all(texts)
    assert (
        len({tokenizer.id_to_token(number) for number in range(tiny.VOCABULARY)}) == tiny.VOCABULARY
    )
    assert sum("\ufffd" in text for text in texts) <= 128  # only halves of a UTF-8 character


_MADE = tiny.tokenizer()


@given(st.text(max_size=80))
def test_a_text_comes_back_as_it_went_in(text: str) -> None:
    if any(special in text for special in tiny.SPECIALS):
        return
    assert (
        _MADE.decode(_MADE.encode(text, add_special_tokens=False).ids, skip_special_tokens=False)
        == text
    )


def test_specials_stand_where_the_configuration_says(model: Path) -> None:
    configuration = json.loads((model / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert tokenizer.token_to_id("</s>") == configuration["eos_token_id"] == tiny.EOS
    assert tokenizer.token_to_id("<s>") == configuration["bos_token_id"] == tiny.BOS
    assert tokenizer.decode([tiny.EOS]) == ""


def test_its_configuration_is_that_of_a_small_llama(model: Path) -> None:
    said = {
        name: json.loads((model / f"{name}.json").read_text())
        for name in ("config", "generation_config", "tokenizer_config")
    }
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 3}
    assert said["generation_config"] == ids
    assert said["config"] == ids | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "vocab_size": 1024,
    }
    assert said["tokenizer_config"] == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "chat_template": tiny.CHAT_TEMPLATE,
    }


def test_tokens_are_bytes_then_letters_behind_a_space_then_pairs() -> None:
    """The letters by their frequency in English: 4 specials, 256 bytes, 26, 26 * 26, and so many
    pairs behind a space as there is room for.
    """
    numbers = (0, 3, 260, 261, 285, 286, 287, 961, 962, 1023)
    assert [_MADE.id_to_token(number) for number in numbers] == [
        *("<s>", "<pad>", "Ġe", "Ġt", "Ġz", "ee", "et", "zz", "Ġee", "Ġad"),
    ]
    assert _MADE.encode("to be<s>").tokens == ["to", "Ġb", "e", "<s>"]


def test_the_weights_are_those_of_the_seed_in_the_order_of_the_layers(model: Path) -> None:
    """Normal numbers, 32 bits of which the upper half is kept; norms of 1."""
    data = (model / "model.safetensors").read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = {
        name: entry for name, entry in json.loads(data[8:begin]).items() if name != "__metadata__"
    }
    rng = np.random.default_rng(20260101)
    layer = {
        "self_attn.q_proj": (128, 128),
        "self_attn.k_proj": (64, 128),
        "self_attn.v_proj": (64, 128),
        "self_attn.o_proj": (128, 128),
        "mlp.gate_proj": (512, 128),
        "mlp.up_proj": (512, 128),
        "mlp.down_proj": (128, 512),
        "input_layernorm": (128,),
        "post_attention_layernorm": (128,),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (1024, 128)}
    for number in (0, 1):
        shapes |= {f"model.layers.{number}.{part}.weight": layer[part] for part in layer}
    shapes |= {"model.norm.weight": (128,), "lm_head.weight": (1024, 128)}
    assert [*header] == [*shapes]
    for name, shape in shapes.items():
        first, end = (begin + offset for offset in header[name]["data_offsets"])
        found = np.frombuffer(data[first:end], "<u2").reshape(header[name]["shape"])
        scale = np.float32(0.002 if name.startswith("lm_head") else 0.02)
        drawn = (
            np.ones(shape, np.float32)
            if "norm" in name
            else rng.standard_normal(shape, dtype=np.float32) * scale
        )
        np.testing.assert_array_equal(found, drawn.view(np.uint32) >> 16, err_msg=name)


def test_two_makings_give_the_same_bytes(model: Path, tmp_path: Path) -> None:
    again = tiny.make_tiny(tmp_path / "again")
    for file in sorted(model.iterdir()):
        ours, theirs = (
            hashlib.sha256((folder / file.name).read_bytes()).hexdigest()
            for folder in (model, again)
        )
        assert ours == theirs, file.name


def test_a_model_that_is_there_is_left_alone(model: Path) -> None:
    before = {file.name: file.stat().st_mtime_ns for file in model.iterdir()}
    assert tiny.make_tiny(model) == model
    assert {file.name: file.stat().st_mtime_ns for file in model.iterdir()} == before


def test_several_makers_at_once_leave_one_whole_model_and_nothing_else(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: tiny.make_tiny(tmp_path / "tiny"), range(4)))
    assert set(made) == {tmp_path / "tiny"}
    assert os.listdir(tmp_path) == ["tiny"]


def test_a_failed_making_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(directory: Path) -> None:
        (directory / "tokenizer.json").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tiny, "_write", full_disk)
    with pytest.raises(
        CommandError, match=r"expected a folder that can be written to \(No space left on device\)"
    ):
        tiny.make_tiny(tmp_path / "tiny")
    assert os.listdir(tmp_path) == []


def test_the_cache_of_the_user_is_the_default_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tiny.tiny_home() == tmp_path / "kendall" / "models" / f"tiny-{tiny.RECIPE}"


@pytest.mark.parametrize("home", ["/proc/nohome", "file"])
def test_a_cache_that_cannot_be_written_is_named_with_the_variable_that_moves_it(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    cache = tmp_path / home / ".cache"  # /proc/nohome stays as it is
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(cache.parent))
    expected = (
        rf"^got {cache}/kendall/models for the model `tiny`; expected a folder that can be "
        r"written to \(.*\): set XDG_CACHE_HOME to "
    )
    with pytest.raises(CommandError, match=expected):
        tiny.make_tiny()


def test_a_user_without_a_home_is_told_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(
        CommandError,
        match="got no home folder for the model `tiny`; expected one: set XDG_CACHE_HOME",
    ):
        tiny.make_tiny()


def test_the_weights_are_readable_by_the_safetensors_library_and_nearly_uniform_at_the_output(
    model: Path,
) -> None:
    safetensors = pytest.importorskip("safetensors")
    pytest.importorskip("torch")
    with safetensors.safe_open(str(model / "model.safetensors"), "pt") as file:
        head = file.get_tensor("lm_head.weight").float()
        assert tuple(head.shape) == (tiny.VOCABULARY, tiny.HIDDEN)
        assert float(head.std()) == pytest.approx(0.002, rel=0.02)
        assert float(file.get_tensor("model.norm.weight").float().min()) == 1.0
