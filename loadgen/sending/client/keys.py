"""The keys of a gateway that is measured: sent, never written to a file, never shown; and the
certificates it may show.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from queueing.commands.remote import SYSTEM, Trust, check_key


@dataclass(frozen=True, slots=True)
class Keys:
    """An API key for what is measured; an admin key for switching and asking, where the gateway has
    one.

    Raises SpecError for a key that cannot be sent.
    """

    api_key: str | None = field(default=None, repr=False)
    admin_key: str | None = field(default=None, repr=False)
    trust: Trust = SYSTEM

    def __post_init__(self) -> None:
        check_key(self.api_key, "--api-key")
        check_key(self.admin_key, "--admin-key")

    @property
    def headers(self) -> dict[str, str]:
        """Of a question to /admin: an admin key opens everything."""
        key = self.admin_key or self.api_key
        return {"authorization": f"Bearer {key}"} if key else {}


NO_KEYS = Keys()
