"""What a gateway is told at its start: one frozen object, one default each."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kendall.options import option
from kendall.policies.durations import Duration
from kendall.queueing.measurement.paths import FileToWrite
from kendall.server.admission.settings import OverloadSettings
from kendall.server.runtime.length_text import LengthPredictorOption
from kendall.server.runtime.logs import LogSettings
from kendall.server.runtime.option_panels import Panel
from kendall.server.security.settings import SecuritySettings
from kendall.server.supervision.settings import MOST_REPLICAS, SupervisionSettings

AutopilotMode = Literal["off", "advise", "act"]
EngineName = Literal["auto", "vllm", "emulated", "http", "ray"]
UnknownFields = Literal["refuse", "ignore"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Flags of `kendall serve`; seconds and tokens."""

    model: str = "tiny"
    served_model_name: str = ""  # the one that answers carry
    served_model_aliases: tuple[str, ...] = ()  # further names that requests may use
    host: str = option(Panel.LISTENING, "Address to listen on.", default="127.0.0.1")
    port: int = option(
        Panel.LISTENING, "Port to listen on (0: any free port).", default=8080, min=0, max=65535
    )
    engine: EngineName = option(
        Panel.ENGINE,
        "Engine: auto (vllm if installed, else emulated) | vllm | emulated | http | ray.",
        default="auto",
    )
    replicas: int = option(
        Panel.ENGINE,
        (
            "Number of engines to start, each one server of the one queue; PUT /admin/servers "
            "changes it if it is 2 or more."
        ),
        default=1,
        min=1,
        max=MOST_REPLICAS,
    )
    ray_address: str | None = option(
        Panel.ENGINE,
        (
            "Address of a Ray cluster for --engine ray, HOST:PORT or auto (the one of this "
            "machine). Default: a Ray of its own."
        ),
    )
    engine_url: tuple[str, ...] = option(
        Panel.BEHIND,
        (
            "URL of a server with OpenAI's API behind the gateway; repeatable, all with the same "
            "models."
        ),
        default=(),
    )
    engine_api_key: str | None = option(
        Panel.BEHIND,
        "Key sent to the servers of --engine-url as a bearer token, and to no other origin.",
        secret=True,
    )
    tokenizer: Path | None = option(
        Panel.BEHIND,
        (
            "Tokenizer that counts prompts where the servers behind do not: a tokenizer.json, a "
            "folder with one, or a model name. Default: estimated from their usage."
        ),
    )
    policy: str = option(
        Panel.QUEUE, "Batching policy, for example capped:max_batch_size=8.", default="continuous"
    )
    max_output_tokens: int | None = option(
        Panel.QUEUE,
        (
            "Largest number of output tokens per request; longer answers are clipped. Default: "
            "only the client's limit."
        ),
        min=1,
    )
    reserved_tokens: int | None = option(
        Panel.ENGINE,
        (
            "Output tokens for which KV memory is kept free when a request starts. Beyond them "
            "vLLM may have to interrupt requests and compute them again. Default: the token limit "
            "of the request where the memory holds --max-num-seqs contexts, else half of an equal "
            "share of the memory."
        ),
        min=1,
    )
    patience: float | None = option(
        Panel.QUEUE,
        (
            "Longest wait in the queue; a request that waits longer is answered with 429. Default: "
            "no limit."
        ),
        reloaded=True,
        parser=Duration(0.001),
    )
    request_timeout: float | None = option(
        Panel.QUEUE,
        (
            "Longest time from the arrival of a request to the end of its answer; after that it "
            "fails with 504. Default: no limit."
        ),
        parser=Duration(0.001),
    )
    first_token_timeout: float | None = option(
        Panel.QUEUE,
        (
            "Longest time from the arrival of a request to its first token; after that it fails "
            "with 504. Default: no limit."
        ),
        parser=Duration(0.001),
    )
    latency: str | None = option(
        Panel.MODEL,
        (
            "Latency law (k1=..,k2=..,k3=..,k4=.. in seconds) or profile; predictions use it, the "
            "emulated engine follows it."
        ),
    )
    calibrate: bool = option(
        Panel.MODEL,
        "Measure the engine's latency law before serving; requests wait until it is done.",
        "--calibrate",
        default=False,
    )
    record_file: Path | None = option(
        Panel.LOGS,
        (
            "Write one JSON line per finished request to this file; an existing file is renamed. "
            "Default: none."
        ),
        parser=FileToWrite("gateway.jsonl", tried=False),
    )
    otlp_traces_endpoint: str | None = option(
        Panel.LOGS,
        "Send an OpenTelemetry trace of every call to this URL (vLLM's name). Default: none.",
    )
    allow_forced_lengths: bool = option(
        Panel.LOGS,
        (
            "Accept the request field with which `kendall load` forces output lengths (for "
            "experiments)."
        ),
        default=False,
    )
    unknown_fields: UnknownFields = option(
        Panel.LISTENING,
        (
            "Request fields that neither OpenAI nor vLLM defines: refuse (400) | ignore. Fields "
            "that they define and Kendall does not support get 501."
        ),
        default="refuse",
    )
    prediction_interval: float = option(
        Panel.MODEL,
        "Time between live predictions (0: no live prediction).",
        default=5.0,
        parser=Duration(),
    )
    what_if_interval: float = option(
        Panel.MODEL,
        "Time between predictions for the other policies.",
        default=60.0,
        parser=Duration(1.0),
    )
    prediction_window: float = option(
        Panel.MODEL,
        "Length of the window over which delays are observed and estimates are made.",
        default=300.0,
        parser=Duration(10.0),
    )
    state_file: Path | None = option(
        Panel.MODEL,
        "File that keeps the latency law and the estimates across restarts. Default: none.",
        parser=FileToWrite("state.json", tried=False),
    )
    length_predictor: str = option(
        Panel.QUEUE,
        (
            "Predict output lengths: none | max_tokens | sent[:keys=NAME+..] | history (of like "
            "prompts) | learned[:path=FILE] (from the words of the prompt) | "
            "http:url=URL[,deadline=S]; the last three with quantile=Q."
        ),
        default="none",
        parser=LengthPredictorOption(),
    )
    autopilot: AutopilotMode = option(
        Panel.AUTOPILOT,
        "off | advise (log the changes it would make) | act (change policy and token limit).",
        default="off",
    )
    autopilot_policies: tuple[str, ...] = option(
        Panel.AUTOPILOT,
        (
            "Policy that the autopilot may choose; repeatable. Default: the policy in force, with "
            "any batch size."
        ),
        default=(),
    )
    max_clipped_fraction: float = option(
        Panel.AUTOPILOT,
        "Largest fraction of answers that a token limit set by the autopilot may clip.",
        default=0.05,
        min=0,
        max=0.999,
    )
    idle_probes: bool = option(
        Panel.MODEL,
        "Measure the latency law while the engine is idle.",
        "--idle-probes",
        default=False,
    )
    shutdown_delay: float = option(
        Panel.FAILURES,
        "Time after SIGTERM during which requests are still accepted while /ready answers 503.",
        default=0.0,
        parser=Duration(endless=False),
    )
    shutdown_timeout: float = option(
        Panel.FAILURES,
        "Time that requests in service have to finish after SIGTERM.",
        default=30.0,
        parser=Duration(endless=False),
    )
    security: SecuritySettings = field(default_factory=SecuritySettings)
    logs: LogSettings = field(default_factory=LogSettings)
    supervision: SupervisionSettings = field(default_factory=SupervisionSettings)
    overload: OverloadSettings = field(default_factory=OverloadSettings)
    enable_auto_tool_choice: bool = option(
        Panel.TOOLS,
        "Let the model decide whether it calls tools (vLLM's name); needs --tool-call-parser.",
        "--enable-auto-tool-choice",
        default=False,
    )
    tool_call_parser: str | None = option(
        Panel.TOOLS,
        (
            "Parser of the model's tool calls, by vLLM's name, for example hermes. Default: none, "
            "and calls that may use tools are refused."
        ),
    )
    reasoning_parser: str | None = option(
        Panel.TOOLS,
        (
            "Parser that separates reasoning from the answer, by vLLM's name, for example qwen3. "
            "Default: none."
        ),
    )
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
