"""Series of other servers as samples of their replicas: whose name is which signal is in
`kendall.queueing.measurement.server_signals`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from kendall.queueing.distributions.token_distribution import Vector
from kendall.queueing.estimation.counters.samples import Buckets, Samples
from kendall.queueing.measurement.server_signals import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    LENGTHS,
    ServerKind,
)

ONE_RANK = ("tp_rank", "pp_rank")  # labels whose values count the same requests again
MODEL = ("model_name", "model")
REPLICA = ("pod", "instance", "engine", "dp_rank")


@dataclass(frozen=True, eq=False)
class Series:
    """One series as it was scraped: instants in seconds, and values."""

    name: str
    labels: Mapping[str, str]
    at: Vector
    values: Vector


@dataclass
class _Replica:
    """The series of one replica, while they are gathered."""

    model: str
    columns: dict[tuple[str, str], list[Series]] = field(default_factory=dict)
    buckets: dict[tuple[str, float], list[Series]] = field(default_factory=dict)


def samples_of(server: ServerKind, series: Iterable[Series], fallback: str = "") -> list[Samples]:
    """Of each model and replica, in the order of their names. Series of one replica that differ in
    other labels are added; `fallback`: the replica of series without a label that names one.
    """
    found = list(series)
    used = server.used({each.name for each in found})
    replicas: dict[tuple[str, str], _Replica] = {}
    for each in found:
        if each.name not in used or any(each.labels.get(r, "0") != "0" for r in ONE_RANK):
            continue
        signal, part = used[each.name]
        model, replica = model_of(each.labels), _replica_of(each.labels) or fallback
        own = replicas.setdefault((model, replica), _Replica(model))
        if part == "_bucket":
            upper = float(each.labels.get("le", "inf"))
            own.buckets.setdefault((signal, upper), []).append(each)
        else:
            own.columns.setdefault((signal, part), []).append(each)
    return [_samples(name, own) for (_, name), own in sorted(replicas.items())]


def model_of(labels: Mapping[str, str]) -> str:
    """The name of the model that a series is of; empty where it has none."""
    return next((labels[name] for name in MODEL if name in labels), "")


def _replica_of(labels: Mapping[str, str]) -> str:
    return "/".join(labels[name] for name in REPLICA if labels.get(name))


def _samples(replica: str, own: _Replica) -> Samples:
    instants = np.unique(np.concatenate([each.at for each in _all(own)]))
    counters, gauges = {}, {}
    for (signal, part), series in own.columns.items():
        column = _column(instants, series)
        if signal in GAUGES:
            gauges[signal] = column
        else:
            assert signal in (*COUNTERS, *HISTOGRAMS)
            counters[signal + part] = column
    buckets = {}
    for signal in LENGTHS:
        uppers = sorted(upper for name, upper in own.buckets if name == signal)
        if uppers:
            columns = [_column(instants, own.buckets[signal, upper]) for upper in uppers]
            buckets[signal] = Buckets(np.array(uppers), np.stack(columns, axis=1))
    # a scrape without the counters, as of gauges that are pushed, is none
    told = np.isfinite(np.array(list(counters.values()))).any(axis=0) if counters else []
    kept = np.asarray(told, dtype=bool)
    return Samples(
        replica=replica,
        model=own.model,
        at=instants[kept] if counters else instants,
        counters={name: values[kept] for name, values in counters.items()},
        gauges={name: values[kept] for name, values in gauges.items()} if counters else gauges,
        buckets={name: Buckets(b.uppers, b.counts[kept]) for name, b in buckets.items()},
    )


def _all(own: _Replica) -> Iterator[Series]:
    for several in (*own.columns.values(), *own.buckets.values()):
        yield from several


def _column(instants: Vector, series: Iterable[Series]) -> Vector:
    """Sums at the instants; not a number where no series has a value."""
    total = np.full(instants.size, np.nan)
    for each in series:
        place = np.searchsorted(instants, each.at)
        total[place] = np.nan_to_num(total[place]) + each.values
    return total
