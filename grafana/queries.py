"""PromQL by what it says: every function returns one expression over the gateways and policies that
are chosen above the dashboard.

A quotient has a value only where its denominator is above 0: a mean of nothing is not zero, and a
chart shows a gap. Gauges that can be "not a number" (nothing is known yet) are compared with a
number that every known value passes, for the same reason. Expressions run on Prometheus 2.42
(Debian's) and later.
"""

from __future__ import annotations

CHOSEN = 'instance=~"$instance"'
CHOSEN_POLICY = f'{CHOSEN}, policy=~"$policy"'
WINDOW = "$__rate_interval"  # four scrapes or more
RANGE = "$__range"  # all that the dashboard shows
POLICY = ("policy",)
WITHOUT_POLICY = (
    "vllm:",
    "process_",
    "kendall_rejections",
    "kendall_wait_",
    "kendall_own_time",
)  # what these count has no policy


def gauge(name: str, labels: str = "", *, known: str = "") -> str:
    """A gauge of the chosen gateways. `known`: a comparison that drops what is not a number."""
    chosen = f"{CHOSEN}, {labels}" if labels else CHOSEN
    return f"{name}{{{chosen}}}{f' {known}' if known else ''}"


def by_policy(name: str, labels: str = "", *, known: str = "") -> str:
    """A gauge with a policy, of the chosen policies."""
    chosen = f"{CHOSEN_POLICY}, {labels}" if labels else CHOSEN_POLICY
    return f"{name}{{{chosen}}}{f' {known}' if known else ''}"


def rate(
    counter: str, labels: str = "", *, by: tuple[str, ...] = POLICY, window: str = WINDOW
) -> str:
    """Per second, summed over what `by` does not name."""
    chosen = CHOSEN if counter.startswith(WITHOUT_POLICY) else CHOSEN_POLICY
    chosen = f"{chosen}, {labels}" if labels else chosen
    return f"{_sum(by)} (rate({counter}{{{chosen}}}[{window}]))"


def mean(histogram: str, *, by: tuple[str, ...] = POLICY, window: str = WINDOW) -> str:
    """Mean of what was observed within the window."""
    return (
        f"{rate(f'{histogram}_sum', by=by, window=window)} / "
        f"({rate(f'{histogram}_count', by=by, window=window)} > 0)"
    )


def quantile(
    histogram: str, level: float, *, by: tuple[str, ...] = POLICY, window: str = WINDOW
) -> str:
    """A quantile, interpolated within its bucket, where anything was observed."""
    buckets = rate(f"{histogram}_bucket", by=("le", *by), window=window)
    seen = rate(f"{histogram}_count", by=by, window=window)
    return f"histogram_quantile({level}, {buckets}) and on ({', '.join(by)}) {seen} > 0"


def within(
    histogram: str, bound: float, *, by: tuple[str, ...] = POLICY, window: str = WINDOW
) -> str:
    """Fraction of the observations up to `bound`, which is the end of a bucket."""
    below = rate(f"{histogram}_bucket", f'le="{bound}"', by=by, window=window)
    return f"{below} / ({rate(f'{histogram}_count', by=by, window=window)} > 0)"


def share(part: str, whole: str) -> str:
    """A part of a whole, 0 where the part was never counted."""
    return f"({part} or 0 * {whole}) / ({whole} > 0)"


def _sum(by: tuple[str, ...]) -> str:
    return f"sum by ({', '.join(by)})"
