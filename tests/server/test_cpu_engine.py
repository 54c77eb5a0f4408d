"""What a CPU engine computes in and the memory it takes follow from the machine, the model and what
the user says.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kendall.server.engines.base import EngineStartError
from kendall.server.engines.checkouts import write_weights
from kendall.server.engines.vllm.machine import Machine
from kendall.server.engines.vllm.options import engine_arguments

GIB = 1 << 30
CONFIG = {
    "dtype": "bfloat16",
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
TOKEN = 2 * 4 * 2 * 8  # numbers that keys and values of one token have
WEIGHTS = 1_000_000  # numbers
ALL = (64 * 4096 + 32) * TOKEN  # numbers of 64 full contexts, and of one block of vLLM's own
ONE = (4096 + 32) * TOKEN
RESERVE = 1.25 * GIB
STEP = 8192 * (4 * 64 + 3 * 256)  # numbers of the largest step
SCARCE = (RESERVE + 2 * WEIGHTS + 2 * STEP + 4e7) / 0.9  # bytes: 40 MB are left for the KV memory
ZEN_4, ZEN_3 = frozenset({"avx2", "avx512_bf16"}), frozenset({"avx2"})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    write_weights(folder, {"w": (1000, 1000)}, [np.zeros((1000, 1000), np.uint16)])
    return folder


def machine(free: float, flags: frozenset[str] = ZEN_4, *, limited: bool = False) -> Machine:
    return Machine(flags, int(free), 64 * GIB, limited)


def changed(model: Path, **fields: Any) -> str:
    (model / "config.json").write_text(json.dumps(CONFIG | fields))
    return str(model)


def kv_memory(model: Path, of: Machine, given: Mapping[str, Any] | None = None, **more: Any) -> int:
    return int(engine_arguments(str(model), given or {}, of, **more)["kv_cache_memory_bytes"])


# ---- the machine ----


def proc(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = "MemTotal:       16777216 kB\nMemFree:         1048576 kB\nMemAvailable:    8388608 kB\n"
CPUINFO = "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu avx2 avx512_bf16\n"


def test_memory_and_flags_are_read_from_proc(tmp_path: Path) -> None:
    root = proc(tmp_path, {"proc/meminfo": MEMINFO, "proc/cpuinfo": CPUINFO})
    expected = Machine(frozenset({"fpu", "avx2", "avx512_bf16"}), 8 * GIB, 16 * GIB, limited=False)
    assert Machine.here(root) == expected


def test_arm_calls_the_flags_features(tmp_path: Path) -> None:
    proc(tmp_path, {"proc/cpuinfo": "Features\t: fp asimd bf16\n"})
    assert Machine.here(tmp_path).flags == {"fp", "asimd", "bf16"}


def test_a_system_without_proc_says_nothing(tmp_path: Path) -> None:
    assert Machine.here(tmp_path) == Machine(frozenset(), None, None, limited=False)


@pytest.mark.parametrize(
    ("files", "left"),
    [
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
                "sys/fs/cgroup/a/memory.max": f"{4 * GIB}\n",
                "sys/fs/cgroup/a/memory.current": f"{GIB}\n",
            },
            3,
        ),
        (
            {
                # a container whose path is the host's: its own group is at the top
                "proc/self/cgroup": "0::/../../docker/123\n",
                "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
                "sys/fs/cgroup/memory.current": f"{GIB}\n",
            },
            1,
        ),
        (
            {
                "proc/self/cgroup": "9:name=systemd:/\n4:memory:/process/1\n0::/\n",
                "sys/fs/cgroup/memory/process/1/memory.limit_in_bytes": f"{6 * GIB}\n",
                "sys/fs/cgroup/memory/process/1/memory.usage_in_bytes": f"{GIB}\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
            },
            5,
        ),
    ],
    ids=["version 2", "container", "version 1"],
)
def test_what_the_control_group_may_still_take_bounds_the_memory(
    tmp_path: Path, files: dict[str, str], left: int
) -> None:
    found = Machine.here(proc(tmp_path, {"proc/meminfo": MEMINFO, **files}))
    assert (found.free, found.limited) == (left * GIB, True)


def test_a_limit_above_what_is_there_changes_nothing_but_what_counts_as_taken(
    tmp_path: Path,
) -> None:
    group = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": f"{99 * GIB}\n",
        "sys/fs/cgroup/memory.current": "0\n",
    }
    found = Machine.here(proc(tmp_path, {"proc/meminfo": MEMINFO, **group}))
    assert (found.free, found.total) == (8 * GIB, 16 * GIB)


def test_the_least_numa_node_with_processors_bounds_the_memory(tmp_path: Path) -> None:
    def node(number: int, free: int, cpus: str) -> dict[str, str]:
        lines = {"MemTotal": 8 << 20, "MemFree": free, "Inactive(file)": 1 << 20}
        text = "".join(f"Node {number} {name}: {value} kB\n" for name, value in lines.items())
        at = f"sys/devices/system/node/node{number}"
        return {f"{at}/meminfo": text, f"{at}/cpulist": f"{cpus}\n"}

    nodes = node(0, 4 << 20, "0-3") | node(1, 2 << 20, "4-7") | node(2, 0, "")
    found = Machine.here(proc(tmp_path, {"proc/meminfo": MEMINFO} | nodes))
    assert (found.free, found.total) == (3 * GIB, 8 * GIB)


# ---- dtype ----


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ({"avx2", "avx512_bf16"}, "bfloat16"),
        ({"amx_bf16"}, "bfloat16"),
        ({"asimd", "bf16"}, "bfloat16"),
        ({"avx2", "avx512f", "avx512_vnni"}, "float32"),
    ],
)
def test_the_processor_decides_what_the_engine_computes_in(
    model: Path, flags: set[str], dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        got = engine_arguments(str(model), {}, machine(16 * GIB, frozenset(flags)))
    assert got["dtype"] == dtype
    reason = next(text for text in caplog.messages if text.startswith("the engine computes in"))
    assert dtype in reason
    assert "avx512_bf16" in reason or dtype == "bfloat16"


@pytest.mark.parametrize("own", ["float32", "auto", "float16"])
def test_the_users_dtype_wins(model: Path, own: str) -> None:
    assert engine_arguments(str(model), {"dtype": own}, machine(16 * GIB))["dtype"] == own


def test_quantised_weights_unknown_processors_and_gpus_keep_vllms_choice(model: Path) -> None:
    assert "dtype" not in engine_arguments(str(model), {}, machine(16 * GIB, frozenset()))
    assert "dtype" not in engine_arguments(str(model), {}, None)
    assert "dtype" not in engine_arguments("owner/name", {}, machine(16 * GIB))
    quantised = changed(model, quantization_config={"quant_method": "awq"})
    assert "dtype" not in engine_arguments(quantised, {}, machine(16 * GIB))


# ---- memory ----


@pytest.mark.parametrize(("flags", "width"), [(ZEN_4, 2), (ZEN_3, 4)])
def test_with_enough_memory_every_sequence_gets_its_full_context(
    model: Path, flags: frozenset[str], width: int
) -> None:
    assert kv_memory(model, machine(16 * GIB, flags)) == ALL * width


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"max_num_seqs": "4"}, (4 * 4096 + 32) * TOKEN * 2),
        ({"max_model_len": "100"}, (64 * 128 + 32) * TOKEN * 2),
        ({"dtype": "float32"}, ALL * 4),
        ({"kv_cache_dtype": "fp8"}, ALL),
        ({"block-size": "16"}, (64 * 4096 + 16) * TOKEN * 2),
    ],
)
def test_what_the_user_says_of_the_engine_decides_what_is_needed(
    model: Path, given: dict[str, str], expected: int
) -> None:
    assert kv_memory(model, machine(16 * GIB), given) == expected


def test_with_less_memory_the_rest_is_taken_and_said(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert kv_memory(model, machine(SCARCE)) == pytest.approx(4e7, abs=100)
    assert (
        "KV memory: 38 MiB, where 64 sequences of 4,096 tokens take 64 MiB; weights: 2 MiB in "
        "bfloat16; 1.4 GiB are free" in caplog.messages
    )


def test_float32_leaves_less_memory_because_the_weights_double(model: Path) -> None:
    two, four = (
        kv_memory(model, machine(SCARCE, frozenset()), {"dtype": dtype})
        for dtype in ("bfloat16", "float32")
    )
    assert two - four == 2 * WEIGHTS + 2 * STEP


def test_in_a_control_group_the_files_of_the_weights_count_as_well(model: Path) -> None:
    without, within = (
        kv_memory(model, machine(SCARCE, limited=limited)) for limited in (False, True)
    )
    assert without - within == (model / "model.safetensors").stat().st_size


def test_one_context_is_taken_even_from_the_reserve(model: Path) -> None:
    assert kv_memory(model, machine(RESERVE + 2 * WEIGHTS + 2 * ONE)) == 2 * ONE


def test_engines_that_share_a_machine_take_equal_parts(model: Path) -> None:
    assert kv_memory(model, machine(3 * SCARCE), engines=3) == kv_memory(model, machine(SCARCE))


LONG = {"max_model_len": 1 << 20}  # one sequence needs 256 MiB


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        (
            SCARCE,
            r"got '.*/model', whose weights take 2 MiB in bfloat16 and one sequence of 1,048,576 "
            r"tokens 256 MiB; expected at most 205 MiB together \(1\.4 GiB are free, of which vLLM "
            r"itself takes 1\.2 GiB\): bound the context, --max-model-len \d+, or free memory$",
        ),
        (GIB, r"expected at most 0 MiB together .*: free memory, or serve a smaller model$"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_in_one_line(
    model: Path, free: float, expected: str
) -> None:
    with pytest.raises(EngineStartError, match=expected) as caught:
        engine_arguments(str(model), LONG, machine(free))
    assert "\n" not in str(caught.value)


def test_the_context_that_the_refusal_names_fits(model: Path) -> None:
    """It is the longest: what is free less vLLM's own, a tenth and the weights, in blocks of 32
    tokens, each with its part of the largest step; one block is vLLM's own.
    """
    with pytest.raises(EngineStartError) as caught:
        engine_arguments(str(model), LONG, machine(SCARCE))
    length = int(str(caught.value).partition("--max-model-len ")[2].partition(",")[0])
    left = int(SCARCE) - RESERVE - int(int(SCARCE) / 10) - 2 * WEIGHTS
    assert length == (left // (32 * 2 * (TOKEN + 4 * 64 + 3 * 256)) - 1) * 32
    assert kv_memory(model, machine(SCARCE), {"max_model_len": length}) >= length * TOKEN * 2


def test_a_context_of_one_block_is_named_and_of_none_not(model: Path) -> None:
    """Nine tenths of what is free less the weights and vLLM's own hold that and one more block."""
    block = 32 * 2 * (TOKEN + 4 * 64 + 3 * 256)
    for blocks, named in ((2, True), (1.99, False)):
        free = (RESERVE + 2 * WEIGHTS + blocks * block + 2) / 0.9
        with pytest.raises(EngineStartError) as caught:
            engine_arguments(str(model), {"max_model_len": 1 << 21}, machine(free))
        assert (", --max-model-len 32, or free" in str(caught.value)) is named


@pytest.mark.parametrize(
    ("size", "words"), [(GIB, "1.0 GiB"), (GIB - 1, "1024 MiB"), (1.25 * GIB, "1.2 GiB")]
)
def test_sizes_are_said_in_mebibytes_below_a_gibibyte(
    model: Path, size: float, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    changed(model, num_attention_heads=0)
    with caplog.at_level(logging.INFO):
        engine_arguments(str(model), {}, machine(size))
    assert caplog.messages[-1] == f"the engine takes 0 MiB of memory: {words} are free"


@pytest.mark.parametrize(
    ("fields", "numbers"),
    [
        ({"head_dim": 5}, 2 * 4 * 2 * 5),
        ({"hidden_size": 71}, 2 * 4 * 2 * 8),  # heads of whole numbers
        ({"num_key_value_heads": None}, 2 * 4 * 8 * 8),
    ],
)
def test_keys_and_values_are_those_of_the_heads(
    model: Path, fields: dict[str, Any], numbers: int
) -> None:
    changed(model, **fields)
    assert kv_memory(model, machine(16 * GIB)) == (64 * 4096 + 32) * numbers * 2


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_lora_rank": 512},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"layer_types": ["sliding_attention"]},
        {"sliding_window": 512},
    ],
)
def test_a_model_that_keeps_less_of_its_context_is_not_refused_for_it(
    model: Path, fields: dict[str, Any]
) -> None:
    changed(model, **fields)
    assert kv_memory(model, machine(RESERVE + 2 * WEIGHTS)) == 64 << 20


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sliding_window": 512, "use_sliding_window": False},
        {"layer_types": ["full_attention"] * 4},
    ],
)
def test_a_model_that_keeps_all_of_its_context_is(model: Path, fields: dict[str, Any]) -> None:
    changed(model, **fields)
    with pytest.raises(EngineStartError):
        kv_memory(model, machine(RESERVE + 2 * WEIGHTS))


def test_where_needs_are_not_known_vllm_gets_a_part_that_is_free(model: Path) -> None:
    for name in ("owner/name", changed(model, num_attention_heads=None)):
        got = engine_arguments(name, {}, machine(20 * GIB))
        assert "kv_cache_memory_bytes" not in got
        part = got["gpu_memory_utilization"]
        assert part == 0.26  # (20 * 0.9 - 1.25) / 64 = 0.2617, whole percents
    most = engine_arguments("owner/name", {}, Machine(ZEN_4, 64 * GIB, 32 * GIB))
    assert most["gpu_memory_utilization"] == 0.92  # vLLM's own


@pytest.mark.parametrize(
    "given",
    [
        {"gpu_memory_utilization": "0.5"},
        {"kv-cache-memory-bytes": "1000000"},
        {"num_gpu_blocks_override": "10"},
        {"tensor_parallel_size": "2"},
    ],
)
def test_memory_that_the_user_chose_is_left_alone(model: Path, given: dict[str, str]) -> None:
    got = engine_arguments(str(model), given, machine(GIB))
    chosen = {"gpu_memory_utilization", "kv_cache_memory_bytes"} & got.keys()
    assert chosen <= {name.replace("-", "_") for name in given}


def test_memory_chosen_by_vllms_variable_is_left_alone(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    assert "kv_cache_memory_bytes" not in engine_arguments(str(model), {}, machine(GIB))


def test_what_vllm_gets_where_needs_are_not_known_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        engine_arguments("owner/name", {}, machine(20 * GIB), engines=2)
    share = int(100 * (10 * 0.9 - 1.25) / 64) / 100 * 64  # GiB
    assert caplog.messages == [
        f"the engine takes {share:.1f} GiB of memory: 20.0 GiB are free, for 2 engines"
    ]


def test_a_cpu_engine_computes_whole_prompts_without_compiling_or_caching(model: Path) -> None:
    got = engine_arguments(str(model), {}, machine(16 * GIB))
    assert {name: got[name] for name in ("enforce_eager", "enable_prefix_caching")} == {
        "enforce_eager": True,
        "enable_prefix_caching": False,
    }
    assert (got["block_size"], got["max_num_seqs"], got["max_num_batched_tokens"]) == (32, 64, 8192)
    assert got["enable_chunked_prefill"] is False
    longer = engine_arguments(str(model), {"max_model_len": "9000"}, machine(16 * GIB))
    assert longer["max_num_batched_tokens"] == 9000
    unknown = engine_arguments("owner/name", {}, machine(16 * GIB))
    assert not {"enable_chunked_prefill", "max_num_batched_tokens"} & unknown.keys()


@pytest.mark.parametrize(("dtype", "width"), [("float16", 2), ("float32", 4), ("float", 4)])
def test_weights_in_another_format_are_taken_to_be_of_half_precision(
    model: Path, dtype: str, width: int
) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(b"\0" * (2 * WEIGHTS + 1))  # an odd number
    free = (RESERVE + width * (WEIGHTS + STEP) + 4e7) / 0.9
    got = kv_memory(model, machine(free), {"dtype": dtype})
    assert got == pytest.approx(4e7, abs=100)


def test_weights_that_cannot_be_read_count_as_large_as_their_file(model: Path) -> None:
    """vLLM says what is wrong with them."""
    for header in (b"{}}", b'{"w": {"dtype": "F32", "shape": [2]}}', b'{"w": 5}'):
        file = len(header).to_bytes(8, "little") + header
        (model / "model.safetensors").write_bytes(file + b"\0" * (2 * WEIGHTS - len(file)))
        got = kv_memory(model, machine(SCARCE))
        assert got == pytest.approx(4e7, abs=100), header


def test_weights_are_counted_from_what_vllm_loads(model: Path) -> None:
    """Of a folder with the weights in two forms one is loaded; quantised tensors keep their
    size.
    """
    header = {
        "w": {"dtype": "BF16", "shape": [1000, 1000], "data_offsets": [0, 2 * WEIGHTS]},
        "q": {"dtype": "I8", "shape": [WEIGHTS], "data_offsets": [2 * WEIGHTS, 3 * WEIGHTS]},
        "__metadata__": {"format": "pt"},
    }
    text = json.dumps(header).encode()
    file = len(text).to_bytes(8, "little") + text + b"\0" * (3 * WEIGHTS)
    (model / "model.safetensors").write_bytes(file)
    (model / "consolidated.safetensors").write_bytes(file)
    (model / "pytorch_model.bin").write_bytes(file)
    free = (RESERVE + 5 * WEIGHTS + 4 * STEP + 4e7) / 0.9
    size = kv_memory(model, machine(free, frozenset()), {"dtype": "float32"})
    assert size == pytest.approx(4e7, abs=100)
