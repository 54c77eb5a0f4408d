"""What a CPU engine computes in and how much memory it takes, chosen from what the machine has.

    dtype       bfloat16 where the processor multiplies it, else float32: without such instructions
                bfloat16 takes several times as long
    KV memory   what max_num_seqs full contexts need, or what is free less weights, the largest step
                and a reserve, whichever is smaller

vLLM alone takes 0.92 of the machine's memory, and does not start where less is free. Imports no
vLLM.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kendall.server.engines.base import EngineStartError
from kendall.server.engines.folder import safetensors_header, weight_files
from kendall.server.engines.vllm.machine import Machine

MAX_NUM_SEQS = 64
BLOCK = 32  # tokens
MIN_BATCHED_TOKENS = 8192  # a batch of 64 prompts of 128 tokens begins in one step
MULTIPLY_BFLOAT16 = ("avx512_bf16", "amx_bf16", "bf16")  # in /proc/cpuinfo; the last one on Arm
# bytes beside weights, KV memory and steps: the gateway and vLLM in its two processes take 1.3 GiB
# (tiny, x86-64, vLLM 0.32, November 2026), of which some is taken already
RESERVE = 5 << 28
RESERVED_PART = 0.1  # of what is free, in addition: others grow as well
VLLM_PART = 0.92  # of the machine's memory: what vLLM takes by itself
FLOATS = ("F16", "BF16", "F32", "F64")  # of safetensors: loaded in the engine's own dtype
WIDTH = {"float32": 4, "float": 4}  # bytes; other dtypes have two
SMALLEST_KV = 64 << 20  # bytes, where the memory that one sequence needs is not known
OTHER_ATTENTION = ("kv_lora_rank", "attention_chunk_size", "layers_block_type")
OWN_MEMORY = ("gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override")
PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
log = logging.getLogger("kendall.engine")


def cpu_defaults(
    model: str, config: Mapping[str, Any], own: Mapping[str, Any], machine: Machine, engines: int
) -> dict[str, Any]:
    """Whole prompts in one step, no compilation, costs that do not depend on what was served
    before; dtype and memory as the machine has them, of which `engines` take equal parts.

    A prompt computed in chunks together with a `seed` kills vLLM's CPU engine ("CPU Generator does
    not use offset"): chunking is off wherever the context's length is known beforehand.

    Raises EngineStartError for a model that does not fit.
    """
    chosen: dict[str, Any] = {
        "enforce_eager": True,
        "block_size": BLOCK,
        "enable_prefix_caching": False,
        "max_num_seqs": MAX_NUM_SEQS,
    }
    length = own.get("max_model_len") or config.get("max_position_embeddings")
    if isinstance(length, int):
        chosen |= {
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(MIN_BATCHED_TOKENS, length),
        }
    chosen |= _dtype(config, own, machine)
    needs = needs_of(Path(model), config, {"max_model_len": length, **chosen, **own})
    return chosen | _memory(model, needs, own, machine, engines)


def _dtype(config: Mapping[str, Any], own: Mapping[str, Any], machine: Machine) -> dict[str, str]:
    """Nothing where the user chose, for quantised weights, which allow few, and for a processor
    or a model that is not known.
    """
    quantised = config.get("quantization_config") or own.get("quantization")
    if "dtype" in own or quantised or not config or not machine.flags:
        return {}
    has = [flag for flag in MULTIPLY_BFLOAT16 if flag in machine.flags]
    if has:
        dtype, reason = "bfloat16", f"the processor has {has[0]}"
    else:
        dtype, reason = "float32", "the processor has neither avx512_bf16 nor amx_bf16"
    log.info("the engine computes in %s: %s", dtype, reason)
    return {"dtype": dtype}


@dataclass(frozen=True, slots=True)
class Needs:
    """What a model takes: bytes, and what its KV memory follows from."""

    weights: int
    files: int  # of the weights, on the disk
    step: int  # the largest one
    activations: int  # of one token in a step
    token: int  # KV memory of one token
    block: int  # tokens
    length: int  # of a context
    max_num_seqs: int
    dtype: str
    keeps_all: bool  # of a context: else `token` is more than it takes

    def kv_memory(self, sequences: int) -> int:
        """Bytes for so many full contexts; vLLM keeps one block for itself."""
        return (sequences * -(-self.length // self.block) + 1) * self.block * self.token


def needs_of(folder: Path, config: Mapping[str, Any], arguments: Mapping[str, Any]) -> Needs | None:
    """None where the configuration does not say, or the weights are not in the folder."""
    length, sequences = arguments["max_model_len"], arguments["max_num_seqs"]
    dtype = str(arguments.get("dtype", "bfloat16"))
    width = WIDTH.get(dtype, 2)
    paths = weight_files(folder)
    weights = sum(_loaded(path, width) for path in paths)
    one_byte = str(arguments.get("kv_cache_dtype", "")).startswith("fp8")
    token = kv_bytes_per_token(config, 1 if one_byte else width)
    if not (isinstance(length, int) and isinstance(sequences, int) and weights and token):
        return None
    kinds = set(config.get("layer_types") or ())
    # layers that keep less than the whole context
    other = any(map(config.get, OTHER_ATTENTION))
    window = config.get("sliding_window") and config.get("use_sliding_window", True)
    numbers = 4 * config.get("hidden_size", 0) + 3 * config.get("intermediate_size", 0)
    return Needs(
        weights=weights,
        files=sum(path.stat().st_size for path in paths),
        step=int(arguments.get("max_num_batched_tokens", length)) * numbers * width,
        activations=numbers * width,
        token=token,
        block=int(arguments["block_size"]),
        length=length,
        max_num_seqs=sequences,
        dtype=dtype,
        keeps_all=not (kinds - {"full_attention"} or window or other),
    )


def _memory(
    model: str, needs: Needs | None, own: Mapping[str, Any], machine: Machine, engines: int
) -> dict[str, Any]:
    """Nothing where the user chose, or where several processes compute one model."""
    chosen = any(name in own for name in OWN_MEMORY) or "VLLM_CPU_KVCACHE_SPACE" in os.environ
    parallel = any((own.get(name) or 1) != 1 for name in PARALLEL)
    if chosen or parallel or machine.free is None or machine.total is None:
        return {}
    free = machine.free // engines
    shared = f"{_gib(machine.free)} are free" + (f", for {engines} engines" if engines > 1 else "")
    reserve = RESERVE + int(RESERVED_PART * free)
    if needs is None:
        part = math.floor(100 * min(VLLM_PART, max(0, free - reserve) / machine.total)) / 100
        log.info("the engine takes %s of memory: %s", _gib(part * machine.total), shared)
        return {"gpu_memory_utilization": part}
    least = needs.kv_memory(1) if needs.keeps_all else 0
    if needs.weights + least + RESERVE > free:
        raise EngineStartError(_too_large(model, needs, free, shared))
    # in a control group vLLM counts the page cache as taken, the files of the weights too
    room = free - reserve - needs.weights - needs.step - (needs.files if machine.limited else 0)
    wanted = needs.kv_memory(needs.max_num_seqs)
    size = min(wanted, max(least or SMALLEST_KV, room))
    log.info(
        "KV memory: %s, where %d sequences of %s tokens take %s; weights: %s in %s; %s",
        _gib(size),
        needs.max_num_seqs,
        f"{needs.length:,}",
        _gib(wanted),
        _gib(needs.weights),
        needs.dtype,
        shared,
    )
    return {"kv_cache_memory_bytes": size}


def _too_large(model: str, needs: Needs, free: int, shared: str) -> str:
    what = (
        f"model: got {model!r}, whose weights take {_gib(needs.weights)} in {needs.dtype} and one "
        f"sequence of {needs.length:,} tokens {_gib(needs.kv_memory(1))}; expected at most "
        f"{_gib(max(0, free - RESERVE))} together ({shared}, of which vLLM itself takes "
        f"{_gib(RESERVE)}): "
    )
    left = free - RESERVE - int(RESERVED_PART * free) - needs.weights
    blocks = left // (needs.block * (needs.token + needs.activations)) - 1
    if needs.keeps_all and blocks > 0:
        length = blocks * needs.block
        return f"{what}bound the context, --max-model-len {length}, or free memory"
    return f"{what}free memory, or serve a smaller model"


def _gib(size: float) -> str:
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.0f} MiB"


def kv_bytes_per_token(config: Mapping[str, Any], width: int) -> int:
    """Keys and values of one token in all layers, each number of `width` bytes; 0 where the
    configuration does not say.
    """
    heads = config.get("num_attention_heads")
    layers = config.get("num_hidden_layers")
    if not heads or not layers:
        return 0
    head_size = config.get("head_dim") or config.get("hidden_size", 0) // heads
    return int(2 * layers * (config.get("num_key_value_heads") or heads) * head_size * width)


def _loaded(path: Path, width: int) -> int:
    """Bytes of the weights in a file, once they are loaded."""
    size = path.stat().st_size
    if path.suffix != ".safetensors":
        return size * width // 2  # half precision, as most are
    try:
        loaded = 0
        for entry in safetensors_header(path).values():
            begin, end = entry["data_offsets"]
            own = entry["dtype"] in FLOATS
            loaded += int(math.prod(entry["shape"]) * width if own else end - begin)
    except (ValueError, KeyError, TypeError):  # vLLM says what is wrong with it
        return size
    return loaded
