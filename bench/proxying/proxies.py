"""The proxies that are compared: each passes every call on to the stub, with one process, without
logs, keys, limits, a database or retries.
"""

from __future__ import annotations

import json
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from bench.gateway_cost.servers import Server, child, running, serving
from bench.proxying.stub import MODEL
from loadgen.gateway.gateway_process import free_port

OURS, LITELLM, ENVOY = "gateway", "LiteLLM", "Envoy"
SLOTS = 64  # more than there are connections: nobody waits in the gateway
QUIET = {
    "LITELLM_LOG": "ERROR",
    "LITELLM_MODE": "PRODUCTION",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",  # the others ask for no key
}


def ours(folder: Path, upstream: int) -> AbstractContextManager[Server]:
    """The gateway with the engine `http`."""
    options = [str(os.getpid()), "serve", "--engine", "http", "--engine-url"]
    options += [f"http://127.0.0.1:{upstream}", "--max-num-seqs", str(SLOTS), "--policy"]
    options += ["continuous", "--max-num-queued-reqs", "1000", "--port", "{port}"]
    return serving(OURS, [child(), *options], folder)


def litellm(folder: Path, upstream: int, program: Path) -> AbstractContextManager[Server]:
    """LiteLLM's proxy with one worker."""
    route = {
        "model": f"openai/{MODEL}",
        "api_base": f"http://127.0.0.1:{upstream}/v1",
        "api_key": "none",
    }
    file = folder / "litellm.yaml"  # JSON is YAML
    file.write_text(
        json.dumps(
            {
                "model_list": [{"model_name": MODEL, "litellm_params": route}],
                "litellm_settings": {"num_retries": 0},
            }
        )
    )
    command = [str(program), "--config", str(file), "--host", "127.0.0.1", "--port", "{port}"]
    return running(LITELLM, [*command, "--num_workers", "1"], folder, QUIET)


def envoy(folder: Path, upstream: int, program: Path) -> AbstractContextManager[Server]:
    """Envoy with one worker thread: plain routing."""
    port = free_port(0)
    file = folder / "envoy.json"
    file.write_text(json.dumps(_routing(port, upstream)))
    command = [str(program), "-c", str(file), "--concurrency", "1", "--log-level", "error"]
    return running(ENVOY, [*command, "--disable-hot-restart"], folder, port=port)


def _routing(port: int, upstream: int) -> dict[str, Any]:
    kinds = "type.googleapis.com/envoy.extensions.filters"
    router = {
        "name": "envoy.filters.http.router",
        "typed_config": {"@type": f"{kinds}.http.router.v3.Router"},
    }
    route = {"match": {"prefix": "/"}, "route": {"cluster": "stub", "timeout": "0s"}}
    manager = {
        "@type": f"{kinds}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "proxy",
        "http_filters": [router],
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
    }
    chain = {
        "filters": [
            {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}
        ]
    }
    endpoint = {"endpoint": {"address": _address(upstream)}}
    cluster = {
        "name": "stub",
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": {
            "cluster_name": "stub",
            "endpoints": [{"lb_endpoints": [endpoint]}],
        },
    }
    listener = {"name": "proxy", "address": _address(port), "filter_chains": [chain]}
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}
