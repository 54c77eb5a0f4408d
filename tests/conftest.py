"""Settings for every test: Hypothesis profiles, and the marker of tests on the real engine."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

from tests.support import on_ci, require_vllm

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is loaded: on small matrices more threads only spin
settings.register_profile("local", deadline=None)  # the machine is shared: a slow example says nothing
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if on_ci() else "local")


@pytest.fixture(autouse=True)
def _engine_is_there(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("engine"):
        require_vllm()
