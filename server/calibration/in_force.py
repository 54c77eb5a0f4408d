"""The latency law that predictions use, and the calibration that measures another one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from kendall.queueing.latency.law import LatencyModel, parse_law
from kendall.queueing.latency.profile import Profile
from kendall.server.runtime.errors import ApiError


class RunningCalibration(Protocol):
    """A running calibration, which can be stopped."""

    def stop(self, error: ApiError) -> None:
        """End it with this error; the law stays."""


class LatencyModelInForce:
    """The law, the profile it came from, and whether it is being measured. Only its methods change
    any of them.
    """

    def __init__(self, law: LatencyModel | None = None) -> None:
        self._law = law
        self._profile: Profile | None = None
        self._calibration: RunningCalibration | None = None

    @property
    def law(self) -> LatencyModel | None:
        """None until one is given, restored or measured."""
        return self._law

    @property
    def profile(self) -> Profile | None:
        """Where the law came from, if it was measured here or restored from such a one."""
        return self._profile

    @property
    def calibrating(self) -> bool:
        """Whether a calibration has the engine to itself."""
        return self._calibration is not None

    def adopt(self, profile: Profile) -> None:
        """Put a measured law in force."""
        self._law, self._profile = profile.law, profile

    def restore(self, profile: Mapping[str, Any] | None, law: str | None) -> None:
        """Put the law of an earlier run in force, unless one was given or measured by now."""
        if self._law is not None:
            return
        if profile is not None:
            self.adopt(Profile.from_dict(dict(profile)))
        elif law is not None:
            self._law = parse_law(law)

    @contextmanager
    def measured_by(self, calibration: RunningCalibration) -> Iterator[None]:
        """Context in which this calibration has the engine to itself."""
        self._calibration = calibration
        try:
            yield
        finally:
            self._calibration = None

    def stop_calibration(self, error: ApiError) -> bool:
        """End the one that runs, with this error. Returns whether one ran."""
        if self._calibration is None:
            return False
        self._calibration.stop(error)
        return True
