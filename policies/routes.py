"""Which of the servers that are free the next requests go to. The queue stays one, and no request
waits for a server while another one is free.

least_loaded  the server with the most free slots; of empty servers the first
prefix        the server that has served the longest prefix of the prompt, as its prefix cache may
              hold it; where none has, as least_loaded

The driver says in `QueueState.prefix_matches` how much of a prompt each server has served. One that
knows no prompts, as the simulator, says nothing, and both routes are the same there.
"""

from __future__ import annotations

from collections.abc import Sequence

from kendall.policies.core import QueueState, Server
from kendall.policies.errors import SpecError

LEAST_LOADED, PREFIX = "least_loaded", "prefix"
ROUTES = (LEAST_LOADED, PREFIX)


def check_route(route: str) -> None:
    """Raises SpecError for an unknown one."""
    if route not in ROUTES:
        raise SpecError(f"got route={route!r}; expected {' or '.join(ROUTES)}")


def matched(state: QueueState, request_id: str, server: Server) -> int:
    """Blocks of the prompt's prefix that the server has served."""
    return state.prefix_matches.get(request_id, {}).get(server.id, 0)


def warmest(state: QueueState, ids: Sequence[str], server: Server) -> Server:
    """For a batch that fits on `server`, which is empty: of the empty servers with the same bounds
    the one that has served most of these prompts, `server` where none has more.
    """
    alike = [
        each
        for each in state.servers
        if not each.in_service and _bounds(each) == _bounds(server) and each.id != server.id
    ]
    if not alike:
        return server
    # of equal ones the first
    return max([server, *alike], key=lambda each: sum(matched(state, id_, each) for id_ in ids))


def by_match(state: QueueState, request_id: str, servers: Sequence[Server]) -> list[Server]:
    """The servers that have served some of this prompt, the longest prefix first; equal ones stay
    in their order.
    """
    found = [server for server in servers if matched(state, request_id, server)]
    found.sort(key=lambda server: matched(state, request_id, server), reverse=True)
    return found


def together(
    state: QueueState, ids: tuple[str, ...], server: Server, servers: Sequence[Server]
) -> tuple[str, ...]:
    """The first of `ids`, and those behind it up to the first that prefers another of `servers`,
    which may all take it; one without any preference follows only such a one.
    """
    for place, request_id in enumerate(ids):
        most = max([matched(state, request_id, each) for each in servers], default=0)
        own = matched(state, request_id, server)
        if not place:
            warm = most > 0
        elif own < most or (most > 0) != warm:
            return ids[:place]
    return ids


def _bounds(server: Server) -> tuple[int, int, int]:
    return server.max_batch_size, server.max_prompt_tokens, server.max_context_tokens
