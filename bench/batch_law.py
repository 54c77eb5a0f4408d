"""Which law do batches on the real engine obey? Padded and elastic batches of the same lengths,
measured and fitted.

    padded     k1 b + k2 + (k3 b + k4) l_max
    unpadded   k1 b + k2 + k3 sum(l) + k4 l_max

Both laws are fitted to both kinds of batches; the own one must win, with a bootstrap interval over
the shapes. The lengths are forced first (no policy can know them), then geometric by `logit_bias`
on the end-of-sequence token (nobody knows them). The machine's speed wanders by tens of percent
over seconds: every pair of batches stands between two reference batches of one fixed shape, and its
times are divided by their speed (mean reference time / median of all references); the raw times are
kept and judged too. Writes a table, a picture and the measurements.

    .venv/bin/python bench/batch_law.py --output docs/batch-law
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from policies import Elastic, Fixed, Policy, Request
from queueing.latency.fit import Measured, fit_law
from queueing.latency.law import LatencyModel
from queueing.measurement.machine import hardware, versions
from server.calibration.designed import Awaited
from server.engines.base import Capabilities, Engine, EngineRequest, Sampling, Step
from server.operations.serving import choose_engine
from server.queue.batcher import Batcher
from server.settings import Settings

PROMPT_TOKENS = 32
LIMIT = 64  # output tokens
SIZES = (2, 4, 8, 16, 24, 32, 48, 64)
MEAN_LENGTHS = (6, 12, 24)


@dataclass(frozen=True, slots=True)
class Shape:
    """One batch to be served: forced lengths, or seeds that let the model end by itself."""

    lengths: tuple[int, ...] | None
    seeds: tuple[int, ...]
    mean_length: int


@dataclass(frozen=True, slots=True)
class Observed:
    """One served batch."""

    shape: int
    padded: bool
    lengths: tuple[int, ...]
    service_time: float  # seconds, as measured
    start_steps: int
    speed: float = 1.0  # of the machine then: reference batches beside it over all of them


def shapes(count: int, rng: np.random.Generator, *, forced: bool) -> list[Shape]:
    """Sizes and length laws in turn; lengths geometric, cut at the limit."""
    found = []
    for index in range(count):
        size, mean = (
            SIZES[index % len(SIZES)],
            MEAN_LENGTHS[index // len(SIZES) % len(MEAN_LENGTHS)],
        )
        lengths = tuple(int(n) for n in np.minimum(rng.geometric(1 / mean, size), LIMIT))
        found.append(
            Shape(
                lengths if forced else None,
                tuple(int(s) for s in rng.integers(1, 2**31, size)),
                mean,
            )
        )
    return found


BOOTSTRAP = 1000
REFERENCE = Shape((16,) * 8, tuple(range(8)), 16)


class Bench:
    """Serves shapes through the gateway's batcher and counts the engine steps in which a batch
    began.
    """

    def __init__(self, engine: Engine, capabilities: Capabilities) -> None:
        self._batcher = Batcher(engine, capabilities, Fixed(batch_size=1))
        self._capabilities = capabilities
        self._count = 0
        self._steps: list[Step] = []
        engine.on_step = self._steps.append

    async def serve(
        self, index: int, shape: Shape, rng: np.random.Generator, *, padded: bool
    ) -> Observed:
        """One batch, from its dispatch until the server is free."""
        size = len(shape.seeds)
        policy: Policy = Fixed(batch_size=size) if padded else Elastic(max_batch_size=size)
        self._batcher.switch(policy)
        self._steps.clear()
        consumers = [Awaited() for _ in shape.seeds]
        sequences = self._batcher.submit(
            [self._engine_request(shape, member, rng) for member in range(size)], consumers
        )
        for sequence, consumer in zip(sequences, consumers, strict=True):
            await consumer.answered
            sequence.released()
        await asyncio.sleep(0.01)  # the engine's account of its last step
        at = sequences[0].at
        assert at.server_free is not None
        assert at.dispatched is not None
        starts = sum(step.admitted > 0 for step in self._steps)
        return Observed(
            index,
            padded,
            tuple(t.stop_detector.output_tokens for t in sequences),
            at.server_free - at.dispatched,
            starts,
        )

    def _engine_request(self, shape: Shape, member: int, rng: np.random.Generator) -> EngineRequest:
        self._count += 1
        prompt = rng.integers(5, self._capabilities.vocab_size, PROMPT_TOKENS).tolist()
        request = Request(
            id=f"bench-{self._count}",
            arrived_at=self._batcher.now(),
            prompt_tokens=PROMPT_TOKENS,
            max_output_tokens=LIMIT,
        )
        if shape.lengths is not None:
            return EngineRequest(
                request, prompt, Sampling(max_tokens=LIMIT, temperature=0.0), shape.lengths[member]
            )
        bias = math.log((self._capabilities.vocab_size - 1) / (shape.mean_length - 1))
        eos = min(self._capabilities.eos_token_ids)
        return EngineRequest(
            request,
            prompt,
            Sampling(max_tokens=LIMIT, seed=shape.seeds[member], logit_bias={eos: bias}),
        )


async def measure(count: int, repeats: int, seed: int, *, forced: bool) -> list[Observed]:
    """Every shape `repeats` times, padded and elastic, in random order."""
    engine, _ = choose_engine(Settings(model="tiny", served_model_name="tiny", engine="vllm"))
    rng = np.random.default_rng(seed)
    try:
        bench = Bench(engine, await engine.start())
        wanted = shapes(count, rng, forced=forced)
        prompts = [int(s) for s in rng.integers(1, 2**31, count)]
        for size in SIZES:  # warm up
            await bench.serve(-1, Shape((4,) * size, tuple(range(size)), 4), rng, padded=True)
        order = [int(index) for _ in range(repeats) for index in rng.permutation(count)]
        pairs, references = [], [await bench.serve(-1, REFERENCE, rng, padded=True)]
        for done, index in enumerate(order):
            pair = [
                await bench.serve(
                    index, wanted[index], np.random.default_rng(prompts[index]), padded=bool(padded)
                )
                for padded in rng.permutation(2)
            ]
            pairs.append(pair)
            references.append(await bench.serve(-1, REFERENCE, rng, padded=True))
            print(f"\r{done + 1} of {len(order)} pairs", end="", flush=True)
        print()
        times = np.array([reference.service_time for reference in references])
        speeds = (times[:-1] + times[1:]) / 2 / np.median(times)
        return [
            replace(one, speed=float(speed))
            for pair, speed in zip(pairs, speeds, strict=True)
            for one in pair
        ]
    finally:
        await engine.stop()


def medians(observed: Sequence[Observed], *, padded: bool, raw: bool = False) -> list[Measured]:
    """The median service time of every shape, by the lengths that it really had, at the
    machine's median speed.
    """
    times: dict[tuple[int, tuple[int, ...]], list[float]] = {}
    for one in observed:
        if one.padded == padded:
            times.setdefault((one.shape, one.lengths), []).append(
                one.service_time / (1.0 if raw else one.speed)
            )
    return [
        Measured(lengths, len(lengths) * PROMPT_TOKENS, float(np.median(all_)))
        for (_, lengths), all_ in times.items()
    ]


def mape(batches: Sequence[Measured], *, padded_law: bool) -> float:
    """Mean absolute percentage error of a law fitted to these batches."""
    law = fit_law(batches, np.random.default_rng(0), padded=padded_law, bootstrap=0).law
    return float(
        np.mean(
            [
                abs(batch.service_time / lawful(law, batch, padded_law=padded_law) - 1)
                for batch in batches
            ]
        )
    )


def verdict(
    observed: Sequence[Observed], rng: np.random.Generator, *, padded: bool
) -> dict[str, object]:
    """The own law's error, the other's, and the interval of the difference over resampled
    shapes.
    """
    batches = medians(observed, padded=padded)
    differences = []
    for _ in range(BOOTSTRAP):
        drawn = [batches[i] for i in rng.integers(0, len(batches), len(batches))]
        differences.append(mape(drawn, padded_law=not padded) - mape(drawn, padded_law=padded))
    fit = fit_law(batches, rng, padded=padded)
    low, high = np.percentile(differences, [2.5, 97.5])
    return {
        "served": "padded" if padded else "elastic",
        "shapes": len(batches),
        "law": str(fit.law),
        "r2": fit.r2,
        "own_mape": mape(batches, padded_law=padded),
        "other_mape": mape(batches, padded_law=not padded),
        "difference_low": float(low),
        "difference_high": float(high),
        "raw_own_mape": mape(medians(observed, padded=padded, raw=True), padded_law=padded),
        "raw_other_mape": mape(medians(observed, padded=padded, raw=True), padded_law=not padded),
        "most_start_steps": max(one.start_steps for one in observed if one.padded == padded),
    }


def draw(observed: Sequence[Observed], name: str, path: Path) -> None:
    """Measured against fitted, one panel per kind of batch."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
    for axis, padded in zip(axes, (True, False), strict=True):
        batches = medians(observed, padded=padded)
        measured = np.array([batch.service_time for batch in batches]) * 1e3
        for law_padded, colour, mark in ((padded, "#1f4e79", "o"), (not padded, "#e07b39", "x")):
            law = fit_law(batches, np.random.default_rng(0), padded=law_padded, bootstrap=0).law
            fitted = [1e3 * lawful(law, batch, padded_law=law_padded) for batch in batches]
            axis.plot(
                fitted,
                measured,
                mark,
                ms=4,
                color=colour,
                alpha=0.8,
                label=f"{'padded' if law_padded else 'unpadded'} law",
            )
        ends = [0, measured.max() * 1.05]
        axis.plot(ends, ends, lw=0.8, color="grey")
        axis.set_title(f"{'padded' if padded else 'elastic'} batches, {name} lengths", fontsize=10)
        axis.set_xlabel("fitted (ms)")
        axis.set_ylabel("measured, median (ms)")
        axis.legend(frameon=False)
    figure.savefig(path, dpi=110)


def lawful(law: LatencyModel, batch: Measured, *, padded_law: bool) -> float:
    """What a fitted law says of a batch, seconds."""
    size, longest, total = len(batch.lengths), max(batch.lengths), sum(batch.lengths)
    return law.padded(size, longest) if padded_law else law.unpadded(size, total, longest)


def report(observed: Sequence[Observed], name: str, run: dict[str, object], folder: Path) -> None:
    """Verdicts on the terminal; data and picture in the folder."""
    verdicts = [
        verdict(observed, np.random.default_rng(1), padded=padded) for padded in (True, False)
    ]
    for one in verdicts:
        print(json.dumps({"lengths": name} | one))
    folder.mkdir(parents=True, exist_ok=True)
    found = run | {
        "lengths": name,
        "verdicts": verdicts,
        "batches": [asdict(one) for one in observed],
    }
    (folder / f"{name}.json").write_text(json.dumps(found) + "\n")
    draw(observed, name, folder / f"{name}.png")


def main() -> None:
    """Measure, judge, draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("runs/batch-law"))
    parser.add_argument("--lengths", choices=("forced", "geometric", "both"), default="both")
    parser.add_argument("--shapes", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    run = {
        "seed": options.seed,
        "shapes": options.shapes,
        "repeats": options.repeats,
        "hardware": hardware(),
        "versions": versions(),
    }
    for name in ("forced", "geometric"):
        if options.lengths in (name, "both"):
            observed = asyncio.run(
                measure(options.shapes, options.repeats, options.seed, forced=name == "forced")
            )
            report(observed, name, run, options.output)


if __name__ == "__main__":
    main()
