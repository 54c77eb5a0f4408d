"""One engine of several, and prompts that any of them reads."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from kendall.server.engines.base import (
    Capabilities,
    Engine,
    InvalidPromptError,
    InvalidSamplingError,
    Sampling,
)
from kendall.server.supervision.supervisor import Supervisor

State = Literal["starting", "serving", "restarting", "lost", "draining"]
T = TypeVar("T")


class Replica:
    """One engine, and who keeps it alive."""

    def __init__(self, server_id: int, engine: Engine, supervisor: Supervisor) -> None:
        self.id, self.engine, self.supervisor = server_id, engine, supervisor
        self.leaving = False  # it ends what it has, and then itself
        self.ended = False  # it is being stopped
        self.capabilities: Capabilities | None = None  # since it has started

    @property
    def serves(self) -> bool:
        """Whether its engine is up."""
        return self.supervisor.serving and not self.ended

    @property
    def hopeless(self) -> bool:
        """Whether it will not serve any more."""
        return self.leaving or self.supervisor.state == "lost"

    @property
    def state(self) -> State:
        """For operators."""
        return "draining" if self.leaving else self.supervisor.state


class ReadByOne:
    """A `PromptReader` on one of several engines; another one reads again where it is lost
    meanwhile.
    """

    def one(self) -> Replica:
        """One that serves. Raises RuntimeError where none does."""
        raise NotImplementedError

    async def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """See `Engine`."""
        return await self._by_one(lambda one: one.encode(text, special_tokens=special_tokens))

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], template_arguments: Mapping[str, Any]
    ) -> list[int]:
        """See `Engine`."""
        return await self._by_one(lambda one: one.encode_chat(messages, template_arguments))

    async def check_sampling(self, sampling: Sampling) -> Sampling:
        """See `Engine`."""
        return await self._by_one(lambda one: one.check_sampling(sampling))

    def decode(self, token_ids: Sequence[int]) -> str:
        """See `Engine`."""
        return self.one().engine.decode(token_ids)

    async def _by_one(self, call: Callable[[Engine], Awaitable[T]]) -> T:
        while True:
            replica = self.one()
            life = replica.supervisor.restarts
            try:
                return await call(replica.engine)
            except (InvalidPromptError, InvalidSamplingError):
                raise
            except Exception:
                if replica.serves and replica.supervisor.restarts == life:
                    raise
