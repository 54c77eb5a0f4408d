"""Batching policies: which waiting requests start next, decided from plain values."""

from kendall.policies.core import (
    Decision,
    Dispatch,
    Policy,
    Preempt,
    QueueState,
    Request,
    Running,
    Server,
    Waiting,
    WaitUntil,
    first_ids,
    fitting_ids,
)
from kendall.policies.fixed import Fixed
from kendall.policies.immediate import Capped, Continuous, Dynamic, Elastic, Single
from kendall.policies.registry import POLICIES, is_built_in, is_first_come
from kendall.policies.text import SpecError, format_policy, parse_policy, policy_batch_size
from kendall.policies.unpadded import served_as

__all__ = [
    "POLICIES",
    "Capped",
    "Continuous",
    "Decision",
    "Dispatch",
    "Dynamic",
    "Elastic",
    "Fixed",
    "Policy",
    "Preempt",
    "QueueState",
    "Request",
    "Running",
    "Server",
    "Single",
    "SpecError",
    "WaitUntil",
    "Waiting",
    "first_ids",
    "fitting_ids",
    "format_policy",
    "is_built_in",
    "is_first_come",
    "parse_policy",
    "policy_batch_size",
    "served_as",
]
