"""The slides' small examples: short and long jobs in a batch, and the size of the KV cache."""

from __future__ import annotations

import numpy as np

from papers.memory import ModelMemory
from papers.reproduction.artefact import Artefact, Panel, Say, Statement, curve

SHORT, LONG, BRIEF, LENGTHY = 6, 4, 1.0, 5.0  # m, n, s, t of the check
FALSE_LONG, FALSE_SHORT = 0.2, 0.3  # p, q


def ordered_wait(short: int, long: int) -> float:
    """Mean wait of `short` jobs of BRIEF seconds before `long` of LENGTHY, all there at once, each
    class in turn.
    """
    services = np.repeat([BRIEF, LENGTHY], [short, long])
    return float((np.cumsum(services) - services).mean())


def random_wait(m: int, n: int) -> float:
    """The same in random order: each other job is ahead with probability 1/2."""
    return (m * ((m - 1) * BRIEF + n * LENGTHY) + n * (m * BRIEF + (n - 1) * LENGTHY)) / (
        2 * (m + n)
    )


def predicted_wait(m: int, n: int) -> float:
    """Predicted short first, each group in random order; expectation over independent errors."""
    p, q = FALSE_LONG, FALSE_SHORT
    ahead = {  # P(another job is served before this one), by the two true classes
        "ss": 0.5,
        "ll": 0.5,
        "long before short": q * (1 - p) / 2 + q * p + (1 - q) * p / 2,
    }
    swapped = ahead["long before short"]
    work = (
        m * (m - 1) * BRIEF * ahead["ss"]
        + n * (n - 1) * LENGTHY * ahead["ll"]
        + m * n * (swapped * LENGTHY + (1 - swapped) * BRIEF)
    )
    return work / (m + n)


def example(say: Say) -> Artefact:
    """Simple scheduling example: m short jobs, n long ones."""
    say("sums")
    m, n, s, t = SHORT, LONG, BRIEF, LENGTHY
    base = (m * m - m) * s + (n * n - n) * t
    printed, right = (base + m * n * s) / (2 * (n + m)), (base + 2 * m * n * s) / (2 * (n + m))
    random = ((m + n) * ((m - 1) * s + (n - 1) * t) + m * t + n * s) / (2 * (n + m))
    best = ordered_wait(m, n)
    gap = n * m * (t - s) * (FALSE_LONG + FALSE_SHORT) / (2 * (n + m))
    found = predicted_wait(m, n) - best
    case = f"m = {m}, n = {n}, s = {s:g}, t = {t:g}"
    statements = (
        Statement(
            f"shortest first, mean wait ({case})",
            f"{printed:g}",
            best,
            f"mns must be 2mns: every long job waits for all short ones ({right:g} by the formula "
            f"so corrected, {best:g} by adding up the waits)",
            fault=True,
        ),
        Statement(f"random order, mean wait ({case})", f"{random:g}", random_wait(m, n)),
        Statement("asymptotic gap of predictions", f"{gap:g}", found),
        Statement(
            "asymptotic gap of the random order",
            f"{n * m * (t - s) / (2 * (n + m)):g}",
            random_wait(m, n) - best,
        ),
    )
    remark = (
        "The formulas give waits, without the job's own service; both gaps are exact, not only "
        "asymptotic."
    )
    return Artefact("slides-example", "Short and long jobs", statements, remarks=(remark,))


def kv_cache(say: Say) -> Artefact:
    """How big is the KV cache: LLaMA-13B, 16 bits, 2048 tokens."""
    say("products")
    layers = {
        name: ModelMemory(layers=n, kv_heads=40, head_dim=128, weights=26e9)
        for name, n in (("as printed, 32 layers", 32), ("the 40 layers of LLaMA-13B", 40))
    }
    sizes = {name: 2048 * memory.bytes_per_token / 1e9 for name, memory in layers.items()}
    first, second = sizes.values()
    note = (
        f"the printed product is {first:.4g} GB; with the 40 layers that LLaMA-13B has, "
        f"{second:.4g} GB"
    )
    tokens = np.array([256.0, 512.0, 1024.0, 2048.0, 4096.0])
    curves = [
        curve(name, tokens, tokens * memory.bytes_per_token / 1e9)
        for name, memory in layers.items()
    ]
    return Artefact(
        "slides-kv",
        "How big is the KV cache",
        (Statement("2 x 32 x 40 x 128 x 2048 x 2 bytes (GB)", "3.2", first, note, fault=True),),
        (Panel("KV cache of one request", "tokens", "GB", tuple(curves)),),
    )
