"""What can be put in force together while the gateway serves."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

Tokens: TypeAlias = Annotated[int, Field(ge=1, le=2**31 - 1)]


class PolicyChange(BaseModel):
    """`PUT /admin/policy`: what is named changes, all of it or nothing; null lifts a limit."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    policy: str | None = None
    max_output_tokens: Tokens | None = None
    patience: Annotated[float, Field(gt=0)] | None = None
