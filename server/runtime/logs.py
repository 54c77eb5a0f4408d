"""What the gateway says of itself on stderr: text for people, or one JSON object a line for
machines.

uvicorn's loggers go the same way. vLLM configures its own, in each of its processes: for JSON it is
given a configuration file with this formatter. Prompts are never logged unless --log-prompts asks
for it.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from kendall.options import option
from kendall.server.runtime.log_writer import PROMPT, LogWriter, let_go, to_stream
from kendall.server.runtime.option_panels import Panel

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
TEXT = "%(asctime)s %(levelname)-7s %(name)s  %(message)s"
VLLM_CONFIGURATION = "VLLM_LOGGING_CONFIG_PATH"
_NO_EXTRA = frozenset(
    {
        *logging.LogRecord("", 0, "", 0, "", (), None).__dict__,
        "message",
        "asctime",
        "vllm_process_name",
        "fileinfo",
        "color_message",
    }
)
log = logging.getLogger("kendall")
_writers: list[LogWriter] = []  # of this process: none or one


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """Flags `--log-level`, `--log-format`, `--log-prompts`."""

    level: LogLevel = option(
        Panel.LOGS,
        "Log level: debug | info | warning | error.",
        "--log-level",
        default="info",
        reloaded=True,
    )
    format: LogFormat = option(
        Panel.LOGS, "Log format: text | json (one object per line).", "--log-format", default="text"
    )
    prompts: bool = option(Panel.LOGS, "Log every prompt in full.", "--log-prompts", default=False)


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message, exception, and what was handed over as
    `extra`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Never fails over a value: what JSON cannot say is written as text."""
        shown: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        shown |= {
            name: value
            for name, value in record.__dict__.items()
            if name not in _NO_EXTRA and name not in shown
        }
        if record.exc_info:
            shown["exception"] = self.formatException(record.exc_info)
        return json.dumps(shown, default=str)


def configure_logs(settings: LogSettings) -> None:
    """Put it in force for this process and for the engine's; call it before vLLM is imported."""
    writer = LogWriter(to_stream(sys.stderr))
    writer.setFormatter(
        JsonFormatter() if settings.format == "json" else logging.Formatter(TEXT, "%H:%M:%S")
    )
    logging.basicConfig(level=settings.level.upper(), handlers=[writer])
    _writers[:] = [writer]
    atexit.register(end_logs)
    for library in ("vllm", "httpx"):  # a line for each request
        logging.getLogger(library).setLevel(logging.WARNING)
    if settings.format == "json" and VLLM_CONFIGURATION not in os.environ:
        os.environ[VLLM_CONFIGURATION] = str(
            _write(vllm_configuration(os.environ.get("VLLM_LOGGING_LEVEL", "ERROR")))
        )


def end_logs() -> None:
    """Write the remaining lines. If stderr is blocked, give up after two seconds."""
    for writer in _writers:
        let_go(writer, sys.stderr)


def log_writer() -> LogWriter | None:
    """What writes the log lines of this process; None where `configure_logs` was not called."""
    return _writers[0] if _writers else None


def route(name: str) -> None:
    """Lines of a library that set up handlers of its own, such as vLLM in this process, go where
    ours go.
    """
    if _writers:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True


def vllm_configuration(level: str) -> dict[str, Any]:
    """vLLM's loggers through our formatter, as `logging.config` has it."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"json": {"()": f"{__name__}.{JsonFormatter.__name__}"}},
        "handlers": {
            "stderr": {
                "class": "logging.StreamHandler",
                "formatter": "json",
                "stream": "ext://sys.stderr",
            }
        },
        "loggers": {"vllm": {"handlers": ["stderr"], "level": level, "propagate": False}},
    }


def log_prompt(request_id: str, prompt: object) -> None:
    """What a client asked, in full; only under --log-prompts."""
    log.info(PROMPT, request_id, prompt, extra={"request_id": request_id, "prompt": prompt})


def _write(configuration: dict[str, Any]) -> Path:
    """To a file of this process, gone when it ends."""
    descriptor, name = tempfile.mkstemp(prefix="kendall-", suffix=".json")
    with os.fdopen(descriptor, "w") as file:
        json.dump(configuration, file)
    atexit.register(_remover(Path(name), os.getpid()))
    return Path(name)


def _remover(path: Path, owner: int) -> Callable[[], None]:
    def remove() -> None:
        if os.getpid() == owner:  # not in a forked child
            path.unlink(missing_ok=True)

    return remove
