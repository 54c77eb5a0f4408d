"""What a calibration is asked for."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class CalibrationRequest(BaseModel):
    """`POST /admin/calibrate`."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    speed_only: bool = False
    seconds: Annotated[float, Field(gt=0, le=600)] = 5.0  # of a speed_only measurement
    # the law that a speed_only measurement is set against; without it the one measured here
    latency: str | None = None
    repeats: Annotated[int, Field(ge=2, le=100)] = 5
    max_batch_size: Annotated[int, Field(ge=1)] | None = None
    max_output_tokens: Annotated[int, Field(ge=2)] | None = None
    prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: int = 0
    name: str | None = None
