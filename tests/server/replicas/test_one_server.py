"""What the watch for stuck engines reads of one server of several."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kendall.server.supervision.replicas.stuck import OneServer


@pytest.mark.parametrize(
    ("down", "proving", "resting"),
    [
        (False, None, False),
        (False, False, False),
        (False, True, True),
        (True, None, True),
        (True, False, True),
    ],
)
def test_a_server_rests_while_all_are_down_or_it_proves_itself(
    down: bool, proving: bool | None, resting: bool
) -> None:
    """`proving` None: it was never lost; the trials of another server do not matter."""
    others = {0: SimpleNamespace(proving=True)}
    own = {} if proving is None else {1: SimpleNamespace(proving=proving)}
    recovery = SimpleNamespace(down=down, servers=others | own)
    batcher: Any = SimpleNamespace(recovery=recovery, policy_failures=None, ask=None)
    assert OneServer(batcher, 1).resting is resting
