"""A load run drawn and ready: the options of `kendall load` as timetable, prompts and the way
they are sent.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kendall.remote import tls_context
from loadgen.datasets import (
    Prompts,
    draw_dataset,
    load_token_counter,
    random_prompts,
    read_dataset,
)
from loadgen.sending.client.client import address_of
from loadgen.sending.client.endpoint import UNKNOWN, LoadEndpoint, look_at, with_lengths
from loadgen.sending.client.target import LoadError, Target
from loadgen.sending.drawn_arrivals import draw_arrivals
from loadgen.sending.job import ClosedLoopUsers, SendOptions
from loadgen.sending.options import LoadOptions
from loadgen.sending.run import VOCABULARY, LoadResult, ProgressDisplay, RunOutput, run_load
from policies.durations import rounded_duration
from policies.text import SpecError
from queueing.arrivals.length_prediction import parse_length_prediction
from queueing.arrivals.text import Process, format_arrivals
from queueing.arrivals.timetable import Timetable, streams, with_flows, with_predictions
from queueing.distributions.flows import parse_flows

LONG = 600.0  # seconds of a timetable from which its length is announced


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """Everything that a run sends, and how."""

    target: Target
    timetable: Timetable
    prompts: Prompts
    seed: int
    process: (
        str  # what the arrivals are asked to be: a process's name, trace, timetable, closed loop
    )
    asked_rate: (
        float | None
    )  # per second in the long run; None where nothing was asked, or all at once
    header: Mapping[str, Any]  # how the timetable was drawn; saved with it
    sending: SendOptions
    # seconds to wait for a server that is not ready; None looks once, 0 not at all
    ready_timeout: float | None
    lengths_open: bool  # drawn lengths are to be met in the way that the server accepts

    @property
    def announced(self) -> str | None:
        """A sentence before the start of a long run; None where it is short, or nobody knows."""
        if (
            self.sending.closed_loop is not None
            or not len(self.timetable)
            or (last := float(self.timetable.intended_at[-1])) < LONG
        ):
            return None
        number = (
            "1 request is"
            if len(self.timetable) == 1
            else f"last of {len(self.timetable):,} requests is"
        )
        return (
            f"the {number} due {rounded_duration(last)} after the start; a higher rate or "
            "fewer requests (--num-prompts) shorten the run"
        )

    async def for_server(self) -> tuple[LoadPlan, str | None]:
        """The plan for the server as it is, after a look at it, and a note on how lengths are
        set. Raises LoadError.
        """
        target, note = self.target, None
        if self.ready_timeout == 0 and target.model and not self.lengths_open:
            return self, None
        endpoint = await self._look()
        target = dataclasses.replace(target, model=target.model or endpoint.models[0])
        if self.lengths_open:
            target, note = with_lengths(target, endpoint)
        header = dict(self.header) if note is None else {**self.header, "lengths_note": note}
        return dataclasses.replace(self, target=target, header=header), note

    async def _look(self) -> LoadEndpoint:
        try:
            return await look_at(self.target, self.ready_timeout)
        except LoadError:
            if (
                self.ready_timeout == 0 and self.target.model
            ):  # the check is off: the requests themselves will tell
                return UNKNOWN
            raise

    @property
    def poisson(self) -> bool:
        """Whether the arrivals are to be a Poisson process of constant rate."""
        return self.process == "poisson" and self.asked_rate is not None

    async def run(
        self,
        progress: ProgressDisplay | None = None,
        path: Path | None = None,
        saved: Path | None = None,
    ) -> LoadResult:
        """Send it; `path` is the run file, `saved` where the timetable is. Raises LoadError."""
        configuration = {**self.header, "timetable": None if saved is None else str(saved)}
        return await run_load(
            self.target,
            self.timetable,
            seed=self.seed,
            prompts=self.prompts,
            options=self.sending,
            output=RunOutput(path=path, configuration=configuration, progress=progress),
        )


def plan_load(options: LoadOptions) -> LoadPlan:
    """Check the options and draw what they ask for. Raises SpecError."""
    options.check()
    source = options.source()
    seed, arrivals, drawn, natural, recorded = draw_arrivals(options, source)
    timetable, prompts, counted = _prompts(options, drawn, seed)
    target = _target(options, natural=natural and not counted)
    asked = _asked(options, arrivals, target) | {"predictor": _predictor(options, recorded)}
    header = {name: value for name, value in asked.items() if value is not None}
    process, rate = _named(arrivals, source)
    plan = LoadPlan(
        target=target,
        timetable=timetable,
        prompts=prompts,
        seed=seed,
        process=process,
        asked_rate=rate,
        header=header,
        sending=_sending(options, len(timetable), seed),
        ready_timeout=options.ready_check_timeout,
        lengths_open=target.lengths == "forced",
    )
    address_of(plan.target)  # all raise for what cannot be sent
    tls_context(target.cacert)
    plan.target.body(prompts[0], 1, 1, seed)
    return plan


def _prompts(
    options: LoadOptions, timetable: Timetable, seed: int
) -> tuple[Timetable, Prompts, bool]:
    """The timetable with the lengths that are known at last, a prompt for each row, and whether
    a dataset has lengths of answers.
    """
    counted = False
    if options.dataset_path is None:
        if not timetable.prompt_tokens.all():
            raise SpecError(
                "got a timetable whose prompts the server counts; expected the --dataset-path "
                "that they come from"
            )
        prompts = random_prompts(timetable, seed, VOCABULARY)
    else:
        counter = None if options.tokenizer is None else load_token_counter(options.tokenizer)
        dataset = read_dataset(options.dataset_path, counter)
        timetable, prompts = draw_dataset(timetable, dataset, seed)
        counted = any(length is not None for length in dataset.output_tokens)
    if options.predictor is not None:
        timetable = with_predictions(timetable, parse_length_prediction(options.predictor), seed)
    if options.flows is not None:
        timetable = with_flows(timetable, parse_flows(options.flows), seed)
    return timetable, prompts, counted


def _sending(options: LoadOptions, rows: int, seed: int) -> SendOptions:
    return SendOptions(
        processes=options.processes,
        max_concurrency=None if options.closed else options.max_concurrency,
        closed_loop=_closed_loop(options, rows, seed) if options.closed else None,
        drain_limit=options.drain_limit,
        max_errors=options.max_errors,
        token_times=options.token_times,
    )


def _closed_loop(options: LoadOptions, rows: int, seed: int) -> ClosedLoopUsers:
    assert options.max_concurrency is not None
    thinking = (
        streams(seed).think_times.exponential(options.think_time, rows)
        if options.think_time
        else None
    )
    return ClosedLoopUsers(
        users=options.max_concurrency, think_times=thinking, duration=options.duration
    )


def _named(process: Process | None, source: str) -> tuple[str, float | None]:
    if source == "--max-concurrency":
        return "closed loop", None
    if process is None:
        return source.removeprefix("--"), None
    rate = process.mean_rate
    return type(process).__name__.lower(), rate if math.isfinite(rate) else None


def _target(options: LoadOptions, *, natural: bool) -> Target:
    """`natural`: no length was asked for."""
    if natural and options.predictor not in (None, "none") and not options.ignore_eos:
        raise SpecError(
            "got --predictor without lengths that it could predict; expected --output-tokens too"
        )
    return Target(
        base_url=options.base_url,
        model=options.model or "",
        max_tokens=options.max_tokens,
        chat=options.chat,
        ignore_eos=options.ignore_eos,
        natural_lengths=options.natural_lengths or (natural and not options.ignore_eos),
        api_key=options.api_key,
        insecure=options.insecure,
        cacert=None if options.cacert is None else str(options.cacert),
    )


def _arrivals(options: LoadOptions, process: Process | None) -> str | None:
    if options.closed:
        return "closed loop"
    if process is not None:
        return format_arrivals(process)
    return "timetable" if options.timetable else None


def _predictor(options: LoadOptions, recorded: str | None) -> str | None:
    given = options.predictor
    return recorded if given is None else str(parse_length_prediction(given))


def _asked(options: LoadOptions, process: Process | None, target: Target) -> dict[str, Any]:
    """What the header of run and timetable says; nothing of it is needed to send the timetable
    again.
    """
    recorded = process is None
    return {
        "arrivals": _arrivals(options, process),
        "request_rate": None if options.closed or process is None else process.mean_rate,
        "trace": None if options.trace is None else str(options.trace),
        "time_scale": options.time_scale if options.trace else None,
        "prompt_tokens": None if recorded or options.dataset_path else options.prompt_tokens,
        "output_tokens": None if recorded else options.output_tokens,
        "lengths": "natural"
        if target.natural_lengths
        else None,  # read where the timetable is sent again
        "dataset": None if options.dataset_path is None else str(options.dataset_path),
        "flows": options.flows,
        "duration": options.duration,
        "think_time": options.think_time or None,
        "drain_limit": options.drain_limit,
    }
