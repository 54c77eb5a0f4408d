"""What a gateway is told at its start: one frozen object, one default each."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kendall.server.admission.limits import OverloadSettings
from kendall.server.runtime.field_marks import RELOADED
from kendall.server.runtime.logs import LogSettings
from kendall.server.security.settings import SecuritySettings
from kendall.server.supervision.settings import SupervisionSettings

AutopilotMode = Literal["off", "advise", "act"]
EngineName = Literal["auto", "vllm", "emulated", "http", "ray"]
UnknownFields = Literal["refuse", "ignore"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Flags of `kendall serve`; seconds and tokens."""

    model: str
    served_model_name: str  # the one that answers carry
    served_model_aliases: tuple[str, ...] = ()  # further names that requests may use
    host: str = "127.0.0.1"
    port: int = 8080
    engine: EngineName = "auto"
    replicas: int = 1  # engines of this kind, each one server of the queue
    ray_address: str | None = None  # of a cluster; None: a Ray of its own on this machine
    engine_url: tuple[str, ...] = ()  # of the servers behind, for the http engine
    engine_api_key: str | None = field(default=None, repr=False)  # that they ask for
    tokenizer: Path | None = None  # counts prompts where they do not
    policy: str = "continuous"
    max_output_tokens: int | None = None
    reserved_tokens: int | None = None  # of an answer, for which memory is kept free
    patience: float | None = field(default=None, metadata=RELOADED)
    request_timeout: float | None = None  # from the arrival to the end of the answer
    first_token_timeout: float | None = None  # from the arrival to the first token
    latency: str | None = None  # law or profile for predictions, and for the emulated engine
    calibrate: bool = False  # measure the law before serving
    record_file: Path | None = None
    otlp_traces_endpoint: str | None = None  # where traces of calls go
    allow_forced_lengths: bool = False
    unknown_fields: UnknownFields = "refuse"  # of requests: names that neither OpenAI nor vLLM has
    prediction_interval: float = 5.0  # 0 switches the live prediction off
    what_if_interval: float = 60.0  # seconds between looks at every other policy
    prediction_window: float = 300.0  # seconds that estimates and observation go back, at most
    state_file: Path | None = None  # where law and estimates survive a restart
    autopilot: AutopilotMode = "off"
    autopilot_policies: tuple[
        str, ...
    ] = ()  # what it may choose from; none: the kind of policy stays
    max_clipped_fraction: float = 0.05  # of the answers, by a token limit that autopilot chooses
    idle_probes: bool = False  # measure the law's shape while nothing is there to serve
    # seconds that requests are accepted after SIGTERM, while /ready answers 503
    shutdown_delay: float = 0.0
    shutdown_timeout: float = 30.0
    security: SecuritySettings = field(default_factory=SecuritySettings)
    logs: LogSettings = field(default_factory=LogSettings)
    supervision: SupervisionSettings = field(default_factory=SupervisionSettings)
    overload: OverloadSettings = field(default_factory=OverloadSettings)
    # as vLLM has them: parsers of tool calls and reasoning in the model's text
    enable_auto_tool_choice: bool = False
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    engine_args: dict[str, Any] = field(default_factory=dict)

    @property
    def own_names(self) -> tuple[str, ...]:
        """The folder or the name on the Hub as they were given, by which requests may ask for the
        model too, where it has no other name than that which follows from them.
        """
        bare = self.model.rstrip("/")
        return (self.model, bare) if bare.rsplit("/", 1)[-1] == self.served_model_name else ()

    def serves(self, name: str) -> bool:
        """Whether requests may ask for this model."""
        return name in (self.served_model_name, *self.served_model_aliases, *self.own_names)

    def under(self, names: Sequence[str]) -> Settings:
        """Served under these names, where the engine decides them; else as they are."""
        if not names:
            return self
        return dataclasses.replace(
            self,
            model=names[0],
            served_model_name=names[0],
            served_model_aliases=tuple(names[1:]),
        )
