"""Token buckets per API key: a rate that holds over time, and a burst that is forgiven.

A bucket fills at `rate` up to `rate x burst` and starts full. Output tokens are not known when a
request comes: its prompt is taken from the bucket when it is admitted, its answer when it has been
given. The bucket may fall below zero by what was under way, and nothing more of that key is
admitted until it is above zero again; the rate holds in the mean. A rejected request takes nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

# buckets kept; the one that was used longest ago is forgotten first, and full again when its key
# returns
MAX_KEYS = 4096


@dataclass(slots=True)
class TokenBucket:
    """`level` at the instant `at`; units per second and units."""

    rate: float
    size: float
    level: float
    at: float

    def seconds_until(self, need: float, now: float) -> float:
        """Until it holds `need` (at most its size); 0 where it does."""
        self._fill(now)
        return max(0.0, min(need, self.size) - self.level) / self.rate

    def take(self, amount: float, now: float) -> None:
        """Take it, below zero if need be."""
        self._fill(now)
        self.level -= amount

    def _fill(self, now: float) -> None:
        self.level = min(self.size, self.level + self.rate * (now - self.at))
        self.at = now


class RateLimits:
    """One bucket of requests and one of tokens for each key, where the rates are limited."""

    def __init__(self, requests: float | None, tokens: float | None, burst: float) -> None:
        self._rates = requests, tokens
        self._burst = burst
        self._buckets: OrderedDict[str, tuple[TokenBucket | None, TokenBucket | None]] = (
            OrderedDict()
        )
        self._owners: dict[str, str] = {}  # of the requests under way

    def seconds_until(self, key: str, now: float, sequences: int = 1) -> float:
        """Until the key may send that many sequences; 0 where it may now."""
        requests, tokens = self._of(key, now)
        waits = [0.0]
        if requests is not None:
            waits.append(requests.seconds_until(sequences, now))
        if tokens is not None:
            waits.append(tokens.seconds_until(1.0, now))
        return max(waits)

    def admitted(self, key: str, request_id: str, prompt_tokens: int, now: float) -> None:
        """One sequence was: the request and its prompt are taken."""
        requests, tokens = self._of(key, now)
        if requests is not None:
            requests.take(1.0, now)
        if tokens is not None:
            tokens.take(prompt_tokens, now)
            self._owners[request_id] = key

    def spend(self, key: str, now: float) -> None:
        """A call that is no request of the queue was answered: it counts as one."""
        requests, _ = self._of(key, now)
        if requests is not None:
            requests.take(1.0, now)

    def answered(self, request_id: str, output_tokens: int, now: float) -> None:
        """It met its outcome: what was made for it is taken."""
        key = self._owners.pop(request_id, None)
        if key is not None:
            tokens = self._of(key, now)[1]
            assert tokens is not None
            tokens.take(output_tokens, now)

    def _of(self, key: str, now: float) -> tuple[TokenBucket | None, TokenBucket | None]:
        found = self._buckets.get(key)
        if found is None:
            requests, tokens = (
                None
                if rate is None
                else TokenBucket(rate, rate * self._burst, rate * self._burst, now)
                for rate in self._rates
            )
            found = self._buckets[key] = (requests, tokens)
            if len(self._buckets) > MAX_KEYS:
                self._buckets.popitem(last=False)
        else:
            self._buckets.move_to_end(key)
        return found
