"""A tiny Llama with random weights, made on the spot: a real model for a real engine, without a
download.

Near-uniform logits (a small output layer) make every token about equally likely at temperature 1,
the end of sequence too: a `logit_bias` on it gives geometric lengths. Weights come from a fixed
seed, so every load is the same model.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kendall.server.engines.checkouts import (
    TOKENIZER,
    make_folder,
    models_home,
    write_json,
    write_weights,
)

RECIPE = 1  # part of the folder's name: a changed recipe makes a new model
SEED = 20260101
VOCABULARY = 1024
HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS = 128, 512, 2, 2, 1
MAX_MODEL_LEN = 2048
SPECIALS = ("<s>", "</s>", "<unk>", "<pad>")
BOS, EOS, UNK, PAD = range(4)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"  # by frequency in English
_SPACE = "Ġ"  # byte-level BPE writes a space so


def tiny_home() -> Path:
    """Where the model lives. Raises CommandError: a user without a home."""
    return models_home("tiny") / f"tiny-{RECIPE}"


def make_tiny(directory: Path | None = None) -> Path:
    """Make the model folder if it is not there yet and return it; see `make_folder`."""
    return make_folder(tiny_home() if directory is None else directory, "tiny", _write)


def _write(directory: Path) -> None:
    tokenizer().save(str(directory / TOKENIZER))
    write_json(directory, _json_files())
    weights = dict(_weights(np.random.default_rng(SEED)))
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    # the upper half of a float32
    halves = ((tensor.view(np.uint32) >> 16).astype(np.uint16) for tensor in weights.values())
    write_weights(directory, shapes, halves)


def _json_files() -> dict[str, dict[str, Any]]:
    ids = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    return {
        "config.json": ids
        | {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            # on a CPU the processor decides (server/engines/vllm/cpu.py)
            "dtype": "float32",
            "hidden_act": "silu",
            "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "max_position_embeddings": MAX_MODEL_LEN,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "vocab_size": VOCABULARY,
        },
        "generation_config.json": ids,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "pad_token": "<pad>",
            "model_max_length": MAX_MODEL_LEN,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    }


def tokenizer() -> Tokenizer:
    """Byte-level BPE built by rule, not trained: every id has a text, every text comes back as
    it went in.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIALS, *alphabet])}
    merges: list[tuple[str, str]] = []
    for left, right in _candidate_merges():
        if len(vocabulary) == VOCABULARY:
            break
        vocabulary[left + right] = len(vocabulary)
        merges.append((left, right))
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIALS]
    )
    return made


def _candidate_merges() -> Iterator[tuple[str, str]]:
    yield from ((_SPACE, letter) for letter in _LETTERS)
    yield from itertools.product(_LETTERS, repeat=2)
    yield from ((_SPACE + a, b) for a, b in itertools.product(_LETTERS, repeat=2))


def _weights(rng: np.random.Generator) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    def normal(rows: int, columns: int, scale: float = 0.02) -> npt.NDArray[np.float32]:
        return rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(scale)

    head = HIDDEN // HEADS
    yield "model.embed_tokens.weight", normal(VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        yield f"{at}.self_attn.q_proj.weight", normal(HEADS * head, HIDDEN)
        yield f"{at}.self_attn.k_proj.weight", normal(KV_HEADS * head, HIDDEN)
        yield f"{at}.self_attn.v_proj.weight", normal(KV_HEADS * head, HIDDEN)
        yield f"{at}.self_attn.o_proj.weight", normal(HIDDEN, HEADS * head)
        yield f"{at}.mlp.gate_proj.weight", normal(INTERMEDIATE, HIDDEN)
        yield f"{at}.mlp.up_proj.weight", normal(INTERMEDIATE, HIDDEN)
        yield f"{at}.mlp.down_proj.weight", normal(HIDDEN, INTERMEDIATE)
        yield f"{at}.input_layernorm.weight", np.ones(HIDDEN, np.float32)
        yield f"{at}.post_attention_layernorm.weight", np.ones(HIDDEN, np.float32)
    yield "model.norm.weight", np.ones(HIDDEN, np.float32)
    # normed activations have length sqrt(HIDDEN): logits get a deviation of 0.002 * 16 = 0.03, near
    # uniform
    yield "lm_head.weight", normal(VOCABULARY, HIDDEN, scale=0.002)
