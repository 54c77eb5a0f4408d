"""Plain `vllm serve`, as a user runs it, with a tiny model."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path

from bench.gateway_cost.servers import Server, serving
from server.engines.tiny import make_tiny

CONTEXT = 2048
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


def vllm_serve(
    folder: Path, slots: int, name: str = "vllm", *, context: int = CONTEXT
) -> AbstractContextManager[Server]:
    """One process, up when the block is entered."""
    arguments = ["bench.gateway_cost.peer", str(os.getpid()), "serve", str(make_tiny())]
    arguments += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", "{port}"]
    arguments += ["--max-num-seqs", str(slots), "--max-model-len", str(context), "--enforce-eager"]
    arguments += ["--dtype", "bfloat16", "--load-format", "dummy", "--block-size", "32"]
    arguments += ["--distributed-executor-backend", "uni"]
    return serving(name, arguments, folder, QUIET)


def url_of(server: Server) -> str:
    """Without /v1."""
    return f"http://127.0.0.1:{server.port}"
