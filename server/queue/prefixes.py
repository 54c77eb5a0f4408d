"""Which servers have served the prefix of a prompt, for `route=prefix`: kept in whole blocks, the
least recently served forgotten first. What the engines themselves keep is not known here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

from kendall.policies import Policy
from kendall.policies.ordered import routes_by_prefix
from kendall.server.engines.base import EngineRequest
from kendall.server.engines.prefix_cache import BLOCK, block_keys
from kendall.server.engines.proxied import PROMPT_START
from kendall.server.queue.sequence import SequenceState

BLOCKS = 256  # of a prompt that are looked at: 4,096 tokens
BLOCK_BYTES = PROMPT_START // BLOCKS  # of a call that is passed on, whose tokens are not known
MOST_BLOCKS = 65_536  # of all prompts: about 16 MB
LEAST_SHARE = 0.5  # of a prompt's blocks; what all prompts begin with would fill one server first


class PrefixMatches(Mapping[str, Mapping[int, int]]):
    """Of each request in `unsettled`, by its id: the servers that have served the prefix of its
    prompt, half of its blocks or more, each with the number of blocks.
    """

    def __init__(self, unsettled: Mapping[str, SequenceState], most: int = MOST_BLOCKS) -> None:
        self._unsettled, self._most = unsettled, most
        # servers, a bit each, by the key of all blocks up to its end; the oldest first
        self._served: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._unsettled)

    def __iter__(self) -> Iterator[str]:
        return iter(self._unsettled)

    def __getitem__(self, request_id: str) -> Mapping[int, int]:
        keys = _keys(self._unsettled[request_id])
        found: dict[int, int] = {}
        known, bits = self._served, -1  # all servers
        for blocks, key in enumerate(keys):
            left = bits & known.get(key, 0)
            if blocks and left != bits:
                found |= dict.fromkeys(_servers(bits & ~left), blocks)
            bits = left
            if not bits:
                break
        if keys and bits > 0:
            found |= dict.fromkeys(_servers(bits), len(keys))
        least = LEAST_SHARE * len(keys)
        return {server: blocks for server, blocks in found.items() if blocks >= least}

    def serve(self, server_id: int, sequences: Sequence[SequenceState]) -> None:
        """They go to this server."""
        served, bit = self._served, 1 << server_id
        for sequence in sequences:
            for key in reversed(_keys(sequence)):  # a prompt's end is forgotten before its start
                served[key] = served.get(key, 0) | bit
                served.move_to_end(key)
            sequence.prefix_keys = None  # a preempted one makes them anew
        while len(served) > self._most:
            served.popitem(last=False)


def matches_for(
    policy: Policy, before: PrefixMatches | None, unsettled: Mapping[str, SequenceState]
) -> PrefixMatches | None:
    """What the policy needs: with what was kept before, or None."""
    if not routes_by_prefix(policy):
        return None
    return PrefixMatches(unsettled) if before is None else before


def _keys(sequence: SequenceState) -> tuple[int, ...]:
    if sequence.prefix_keys is None:
        sequence.prefix_keys = prefix_keys(sequence.engine_request)
    return sequence.prefix_keys


def prefix_keys(engine_request: EngineRequest) -> tuple[int, ...]:
    """Of the first whole blocks of its prompt."""
    call = engine_request.call
    if call is not None:
        return tuple(block_keys(call.prompt_start, None, BLOCK_BYTES))
    start = engine_request.prompt_token_ids[: BLOCKS * BLOCK]
    return tuple(block_keys(start, engine_request.cache_salt))


def _servers(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
