"""A rate for each policy, at a load of 0.5 to 0.8."""

from __future__ import annotations

import pytest

CASES = {  # policy -> rate at a load of 0.5 to 0.8
    "single": 8.0,
    "dynamic": 40.0,
    "fixed:batch_size=4": 18.0,
    "fixed:batch_size=4,max_wait=0.05": 10.0,
    "capped:max_batch_size=4": 18.0,
    "elastic": 60.0,
    "elastic:max_batch_size=4": 18.0,
    "continuous:max_batch_size=8": 50.0,
    "continuous": 50.0,
}
each_policy = pytest.mark.parametrize(("policy", "rate"), list(CASES.items()), ids=list(CASES))
