"""What the gateway observed, what it predicted, and its verdict: one value a gateway.

The quantity is the one that the verdict is about: the queueing delay, or the sojourn time where a
request joins a batch in service (`continuous`). A gateway exposes an observed sojourn time, and the
interval of a predicted one, only where it compares them; the queries choose by that.
"""

from __future__ import annotations

from grafana.queries import by_policy, gauge

VERDICTS = {"0": ("disagree", "red"), "1": ("agree", "green"), "2": ("not enough data", "text")}
QUANTITIES = {"sojourn_time": "sojourn time", "queueing_delay": "queueing delay"}
SAME = "on (instance, policy)"


def observed(stat: str = "mean") -> str:
    """Seconds, with the label `quantity`."""
    chosen = _label("stat", stat)
    sojourn, delay = (by_policy(f"kendall_observed_{name}_seconds", chosen) for name in QUANTITIES)
    return _either(f"{sojourn} >= 0", f"{delay} >= 0 unless {SAME} {sojourn}")


def predicted(stat: str = "mean") -> str:
    """Seconds, with the label `quantity`."""
    sojourn, delay = (
        f"{by_policy(name, _label('stat', stat))} >= 0 "
        f"and {SAME} {by_policy(name, _label('stat', 'mean_low'))}"
        for name in (f"kendall_predicted_{each}_seconds" for each in QUANTITIES)
    )
    return _either(sojourn, delay)


def modelled() -> str:
    """The model of the very requests that came, seconds, with the label `quantity`."""
    chosen = _label("stat", "modelled")
    return _either(
        *(by_policy(f"kendall_checked_{name}_seconds", chosen) + " >= 0" for name in QUANTITIES)
    )


def _either(*expressions: str) -> str:
    """In the order of QUANTITIES; a gateway has one of them."""
    return " or ".join(
        f'label_replace(max by (instance) ({expr}), "quantity", "{words}", "", "")'
        for expr, words in zip(expressions, QUANTITIES.values(), strict=True)
    )


def verdict_code(of: str) -> str:
    """0, 1 or 2, as VERDICTS names them; no value before the first assessment of an epoch."""
    parts = (
        f"max by (instance) ({code} * ({gauge(of, _label('verdict', word))} == 1))"
        for code, (word, _) in VERDICTS.items()
    )
    return " or ".join(parts)


def _label(name: str, value: str) -> str:
    return f'{name}="{value}"'
