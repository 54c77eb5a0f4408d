"""What an operator or the autopilot can change while the gateway serves: the policy, the token
limit, the patience. They change together, and each change begins an epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from kendall.policies import Policy, SpecError, format_policy, parse_policy
from kendall.policies.core import UNBOUNDED
from kendall.policies.ordered import check_continued
from kendall.policies.registry import every_policy
from kendall.server.queue.batcher import Batcher
from kendall.server.runtime.errors import ApiError, not_started
from kendall.server.telemetry.metrics import Metrics

log = logging.getLogger("kendall")
FALLBACK = "continuous"  # serves in place of a policy that cannot decide
Tokens: TypeAlias = Annotated[int, Field(ge=1, le=2**31 - 1)]


class PolicyChange(BaseModel):
    """`PUT /admin/policy`: what is named changes, all of it or nothing; null lifts a limit."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    policy: str | None = None
    max_output_tokens: Tokens | None = None
    patience: Annotated[float, Field(gt=0)] | None = None


class LimitsInForce:
    """Only its methods change any of them. `on_epoch` is called with the number of each epoch that
    begins, `on_manual_switch` with a policy that someone else than the autopilot put in force.
    """

    def __init__(
        self,
        policy: str,
        max_output_tokens: int | None,
        patience: float | None,
        metrics: Metrics,
        *,
        reserved_tokens: int | None = None,
    ) -> None:
        self._first = parse_policy(policy)
        self.max_output_tokens = max_output_tokens
        self.patience = patience
        self._reserved = reserved_tokens
        self._metrics = metrics
        self._batcher: Batcher | None = None
        self.fault: str | None = None  # why the policy that was asked for is not in force
        listed = every_policy()
        for each in listed:
            if (fault := each.fault) is not None:
                log.warning("policy %s of %s cannot be used: %s", each.name, each.source, fault)
        self.policies = [each.to_dict() for each in listed if each.fault is None]
        self.on_epoch: list[Callable[[int], None]] = []
        self.on_manual_switch: Callable[[str], None] | None = None

    def govern(self, batcher: Batcher) -> None:
        """The engine is up, and this is its queue."""
        self._batcher = batcher
        batcher.limit_tokens(self.max_output_tokens)
        batcher.policy_failures.on_faulty = self.replace_faulty
        batcher.policy_failures.on_failure = lambda: self._metrics.policy_failed(
            batcher.policy_text
        )
        self._metrics.switched(
            batcher.policy_text, self.max_output_tokens, batcher.epoch, changed_policy=False
        )

    @property
    def reserved_tokens(self) -> int:
        """Of an answer, for which memory is kept free from its start on; UNBOUNDED: its limit."""
        if self._reserved is not None:
            return self._reserved
        batcher = self._batcher
        return UNBOUNDED if batcher is None else batcher.capabilities.reserved_tokens

    @property
    def policy(self) -> Policy:
        """The policy of `policy_text`, in the form that the engine can serve."""
        return self._first if self._batcher is None else self._batcher.policy

    @property
    def policy_text(self) -> str:
        """The policy in force, or the one that will be once the engine serves."""
        return format_policy(self._first) if self._batcher is None else self._batcher.policy_text

    def state(self) -> dict[str, Any]:
        """What `GET /admin/policy` answers. Raises ApiError before the engine is up."""
        batcher = self._queue()
        return {
            "policy": batcher.policy_text,
            "effective_max_batch_size": batcher.effective_max_batch_size,
            "padded": batcher.policy.padded and batcher.capabilities.pads,
            "max_output_tokens": self.max_output_tokens,
            "patience": self.patience,
            "epoch": batcher.epoch,
        } | ({} if self.fault is None else {"fault": self.fault})

    def begin_epoch(self, policy: Policy | None = None) -> int:
        """Another policy, or only another limit, law or engine: statistics begin anew. Returns the
        epoch's number.
        """
        batcher = self._queue()
        epoch = batcher.switch(policy)
        self._metrics.switched(
            batcher.policy_text, self.max_output_tokens, epoch, changed_policy=policy is not None
        )
        for begin in self.on_epoch:
            begin(epoch)
        return epoch

    def change(self, change: PolicyChange, *, by_autopilot: bool = False) -> dict[str, Any]:
        """Put policy and limits in force together, or raise and change nothing."""
        batcher = self._queue()
        try:
            policy = None if change.policy is None else parse_policy(change.policy)
            if policy is not None and batcher.capabilities.engine == "http":
                check_continued(policy)
        except SpecError as error:
            raise ApiError(400, "invalid_policy", str(error), param="policy") from None
        if policy is not None and format_policy(policy) == batcher.policy_text:
            policy = None
        named = change.model_fields_set
        limit = change.max_output_tokens if "max_output_tokens" in named else self.max_output_tokens
        patience = change.patience if "patience" in named else self.patience
        if policy is None and (limit, patience) == (self.max_output_tokens, self.patience):
            return self.state()  # nothing changes: the evidence of the epoch is kept
        if limit != self.max_output_tokens:
            batcher.limit_tokens(limit)
        self.max_output_tokens, self.patience = limit, patience
        self.fault = None if policy is not None else self.fault
        epoch = self.begin_epoch(policy)
        if policy is not None and self.on_manual_switch is not None and not by_autopilot:
            self.on_manual_switch(batcher.policy_text)
        log.info(
            "epoch %d: policy %s, max_output_tokens %s, patience %s",
            epoch,
            batcher.policy_text,
            "none" if limit is None else limit,
            "none" if patience is None else f"{patience:g} s",
        )
        return self.state()

    def replace_faulty(self, error: str) -> None:
        """The policy in force does not decide: what waits is served under another."""
        was = self._queue().policy_text
        log.error("policy %s is replaced by %s: %s", was, FALLBACK, error)
        self.change(PolicyChange(policy=FALLBACK))
        self.fault = f"{FALLBACK} replaced {was}: {error}"

    def change_patience(self, seconds: float | None) -> None:
        """Also before the engine is up."""
        if self._batcher is None:
            self.patience = seconds
        else:
            self.change(PolicyChange(patience=seconds))

    def _queue(self) -> Batcher:
        if self._batcher is None:
            raise not_started()
        return self._batcher
