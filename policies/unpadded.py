"""What a padded policy comes to on an engine that cannot pad: the same decisions, and each member
of a batch leaves when it is complete.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, ClassVar

from kendall.policies.core import Policy, Release
from kendall.policies.fixed import Fixed
from kendall.policies.immediate import Capped, Dynamic, Elastic
from kendall.policies.ordered import KEYS, Ordered


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpaddedFixed(Fixed):
    """Fixed batching whose members leave when they are complete; the server is free after the
    last. Its text is that of `fixed`.
    """

    padded: ClassVar[bool] = False
    release: ClassVar[Release] = "request"


def served_as(policy: Policy, *, pads: bool) -> Policy:
    """The policy as an engine serves it that pads, or cannot: dynamic and capped batches are
    elastic ones there.
    """
    if pads or not policy.padded:
        return policy
    match policy:
        case Dynamic():
            return Elastic(**_shared(policy))
        case Capped():
            return Elastic(max_batch_size=policy.max_batch_size, **_shared(policy))
        case Fixed():
            return _as(UnpaddedFixed, policy)
        case _:
            return _as(_unpadded(type(policy)), policy)


def _shared(policy: Ordered) -> dict[str, Any]:
    return {key: getattr(policy, key) for key in (*KEYS, "route")}


def _as(cls: type[Policy], policy: Policy) -> Policy:
    """With the same parameters."""
    given = {
        field.name: getattr(policy, field.name)
        for field in dataclasses.fields(policy)  # type: ignore[arg-type]
        if field.init
    }
    return cls(**given)


@functools.cache
def _unpadded(cls: type[Policy]) -> type[Policy]:
    """Of a policy from outside."""
    changed = {"padded": False, "release": "request", "__slots__": (), "__module__": cls.__module__}
    return type(cls.__name__, (cls,), changed)
