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

import numpy as np

from kendall.loadgen.datasets import (
    Prompts,
    Turn,
    choose,
    draw_dataset,
    draw_turns,
    load_token_counter,
    random_prompts,
    read_conversations,
    read_dataset,
)
from kendall.loadgen.sending.cancellations import parse_cancellations
from kendall.loadgen.sending.client.client import address_of
from kendall.loadgen.sending.client.endpoint import UNKNOWN, look_at, with_lengths
from kendall.loadgen.sending.client.server_queue import QueueWatch
from kendall.loadgen.sending.client.target import (
    OWN_HEADERS,
    LoadError,
    Target,
    parse_extra_body,
)
from kendall.loadgen.sending.drawn_arrivals import draw_arrivals, length_laws
from kendall.loadgen.sending.job import ClosedLoopUsers, SendOptions
from kendall.loadgen.sending.options import LoadOptions
from kendall.loadgen.sending.run import VOCABULARY, LoadResult, ProgressDisplay, RunOutput, run_load
from kendall.policies.durations import rounded_duration
from kendall.policies.text import SpecError
from kendall.queueing.arrivals.length_prediction import parse_length_prediction
from kendall.queueing.arrivals.text import format_arrivals
from kendall.queueing.arrivals.timetable import (
    IntArray,
    Timetable,
    one_each,
    shared_tokens,
    streams,
    with_flows,
    with_models,
    with_predictions,
    with_turns,
)
from kendall.queueing.distributions.flows import parse_flows, parse_models
from kendall.queueing.distributions.token_distribution import SHORTER, parse_distribution
from kendall.remote import parse_headers

UNCOUNTED = (
    "got a timetable whose prompts the server counts; expected the --dataset-path that they come "
    "from"
)
LONG = 600.0  # seconds of a timetable from which its length is announced


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """Everything that a run sends, and how."""

    target: Target
    timetable: Timetable
    prompts: Prompts
    seed: int
    process: str  # that is asked for: its name, or trace, timetable, closed loop
    # per second in the long run; None where nothing was asked, or all at once
    asked_rate: float | None
    header: Mapping[str, Any]  # how the timetable was drawn; saved with it
    sending: SendOptions
    # seconds to wait for a server that is not ready; None looks once, 0 not at all
    ready_timeout: float | None
    lengths_open: bool  # drawn lengths are to be met in the way that the server accepts
    # no gateway of ours: what it tells of its queue is in its /metrics
    foreign: bool = False

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
        try:
            endpoint = await look_at(target, self.ready_timeout)
        except LoadError:
            if self.ready_timeout != 0 or not target.model:
                raise
            endpoint = UNKNOWN  # the check is off: the requests themselves will tell
        target = dataclasses.replace(target, model=target.model or endpoint.models[0])
        unknown = [name for name in target.models if name not in endpoint.models]
        if endpoint.kendall and unknown:
            raise SpecError(
                f"got --model {unknown[0]}; expected one that {target.base_url} serves: "
                f"{', '.join(endpoint.models)}"
            )
        if self.lengths_open:
            target, note = with_lengths(target, endpoint)
        header = dict(self.header) if note is None else {**self.header, "lengths_note": note}
        foreign = endpoint is not UNKNOWN and not endpoint.kendall
        return dataclasses.replace(self, target=target, header=header, foreign=foreign), note

    @property
    def poisson(self) -> bool:
        return self.process == "poisson" and self.asked_rate is not None

    async def run(
        self,
        progress: ProgressDisplay | None = None,
        path: Path | None = None,
        saved: Path | None = None,
    ) -> LoadResult:
        """Send it; `path` is the run file, `saved` where the timetable is. Raises LoadError."""
        configuration = {**self.header, "timetable": None if saved is None else str(saved)}
        watch = await QueueWatch.begin(self.target) if self.foreign else None
        return await run_load(
            self.target,
            self.timetable,
            seed=self.seed,
            prompts=self.prompts,
            options=self.sending,
            output=RunOutput(
                path=path,
                configuration=configuration,
                at_end=None if watch is None else watch.at_end,
                progress=progress,
            ),
        )


def plan_load(options: LoadOptions) -> LoadPlan:
    """Check the options and draw what they ask for. Raises SpecError."""
    options.check()
    source = options.source()
    seed, arrivals, drawn, natural, recorded, block_tokens = draw_arrivals(options, source)
    if options.ignore_hash_ids or options.dataset_path is not None or block_tokens is None:
        drawn = dataclasses.replace(drawn, hash_ids=None)
    timetable, prompts, counted = _prompts(options, drawn, seed, block_tokens)
    models = parse_models(options.model)
    if len(models.names) > 1:
        timetable = with_models(timetable, models, seed)
    timetable = one_each(timetable)
    natural = natural and not counted and not options.ignore_eos
    if natural and options.predictor not in (None, "none"):
        raise SpecError(
            "got --predictor without lengths that it could predict; expected --output-tokens too"
        )
    target = Target(
        base_url=options.base_url,
        model=models.names[0] if models.names else "",
        models=models.names if len(models.names) > 1 else (),
        max_tokens=options.max_tokens,
        chat=options.chat,
        ignore_eos=options.ignore_eos,
        natural_lengths=options.natural_lengths or natural,
        api_key=options.api_key,
        trust=options.trust,
        headers=parse_headers(options.header, OWN_HEADERS),
        extra_body=parse_extra_body(options.extra_body),
    )
    rate, description = None, "timetable" if options.timetable else None
    closed_loop: ClosedLoopUsers | None = None
    if options.closed and options.max_concurrency is not None:
        process = description = "closed loop"
        think_times = streams(seed).think_times
        closed_loop = ClosedLoopUsers(
            users=options.max_concurrency,
            think_times=think_times.exponential(options.think_time, len(timetable))
            if options.think_time
            else None,
            duration=options.duration,
        )
    elif arrivals is None:
        process = source.removeprefix("--")
    else:
        process, description = type(arrivals).__name__.lower(), format_arrivals(arrivals)
        rate = arrivals.mean_rate
    predictor = options.predictor
    drawn_lengths = arrivals is not None
    # nothing of it is needed to send the timetable again, but for the lengths
    asked = {
        "arrivals": description,
        "request_rate": rate,
        "trace": None if options.trace is None else str(options.trace),
        "time_scale": options.time_scale if options.trace else None,
        "prompt_tokens": options.prompt_tokens
        if drawn_lengths and not options.dataset_path
        else None,
        "output_tokens": options.output_tokens if drawn_lengths else None,
        "lengths": "natural" if target.natural_lengths else None,
        "block_tokens": block_tokens if timetable.hash_ids is not None else None,
        "shared_prompt_tokens": _shared(timetable, block_tokens),
        "dataset": None if options.dataset_path is None else str(options.dataset_path),
        "flows": options.flows,
        "turns": options.turns,
        "models": str(models) if target.models else None,
        "cancel": options.cancel,
        "cancel_after": options.cancel_after,
        "duration": options.duration,
        "think_time": options.think_time or None,
        "drain_limit": options.drain_limit,
        "predictor": recorded if predictor is None else str(parse_length_prediction(predictor)),
    }
    address_of(target)  # all raise for what cannot be sent
    target.trust.context()
    if timetable.turn is None:  # else text or messages are made of it
        target.body(prompts[0], 1, 1, seed)
    return LoadPlan(
        target=target,
        timetable=timetable,
        prompts=prompts,
        seed=seed,
        process=process,
        asked_rate=None if rate is None or math.isinf(rate) else rate,
        header={name: value for name, value in asked.items() if value is not None},
        sending=SendOptions(
            processes=options.processes,
            max_concurrency=None if options.closed else options.max_concurrency,
            closed_loop=closed_loop,
            drain_limit=options.drain_limit,
            max_errors=options.max_errors,
            token_times=options.token_times,
        ),
        ready_timeout=options.ready_check_timeout,
        lengths_open=target.lengths == "forced",
    )


def _shared(timetable: Timetable, block_tokens: int | None) -> float | None:
    """Share of the prompt tokens that a prefix cache without a limit has; None without hash ids."""
    if timetable.hash_ids is None or block_tokens is None:
        return None
    return float(
        shared_tokens(timetable, block_tokens).sum() / max(timetable.prompt_tokens.sum(), 1)
    )


def _prompts(
    options: LoadOptions, timetable: Timetable, seed: int, block_tokens: int | None
) -> tuple[Timetable, Prompts, bool]:
    """The timetable with the lengths that are known at last, a prompt for each row, and whether
    a dataset has lengths of answers.
    """
    counted = False
    if options.turns is not None or timetable.turn is not None:
        timetable, prompts, counted = _conversations(options, timetable, seed)
    elif options.dataset_path is None:
        if not timetable.prompt_tokens.all():
            raise SpecError(UNCOUNTED)
        prompts = random_prompts(timetable, seed, VOCABULARY, block_tokens)
    else:
        counter = None if options.tokenizer is None else load_token_counter(options.tokenizer)
        dataset = read_dataset(options.dataset_path, counter)
        timetable, prompts = draw_dataset(timetable, dataset, seed)
        counted = any(length is not None for length in dataset.output_tokens)
    if options.predictor is not None:
        timetable = with_predictions(timetable, parse_length_prediction(options.predictor), seed)
    if options.flows is not None:
        timetable = with_flows(timetable, parse_flows(options.flows), seed)
    cancellations = parse_cancellations(options.cancel, options.cancel_after)
    if cancellations is not None:
        timetable = cancellations.of(timetable, seed)
    return timetable, prompts, counted


def _conversations(
    options: LoadOptions, timetable: Timetable, seed: int
) -> tuple[Timetable, Prompts, bool]:
    """The same of conversations: one for each row of a timetable without turns."""
    known: list[list[Turn]] | None = None
    if options.dataset_path is not None:
        counter = None if options.tokenizer is None else load_token_counter(options.tokenizer)
        known = read_conversations(options.dataset_path, counter)
    if timetable.turn is None:
        prompt_tokens, output_tokens = length_laws(options)
        timetable = with_turns(
            timetable,
            _turns(options.turns or "", known, len(timetable), seed),
            seed,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            think_time=0.0 if options.closed else options.think_time,
        )
    if known is not None:
        return draw_turns(timetable, known, seed)
    if not timetable.prompt_tokens.all():
        raise SpecError(UNCOUNTED)
    return timetable, random_prompts(timetable, seed, VOCABULARY), False


def _turns(text: str, known: list[list[Turn]] | None, count: int, seed: int) -> IntArray:
    """How many turns so many conversations have, at most as many as those of a dataset."""
    if text == "all" and known is None:
        raise SpecError(
            "got --turns all without --dataset-path; expected a distribution, for example "
            "--turns geometric:mean=3"
        )
    if known is None:
        drawn = parse_distribution(text, remedy=SHORTER).sample(streams(seed).turns, count)
        return np.maximum(drawn, 1)
    most = np.array([len(known[place]) for place in choose(seed, len(known), count)])
    if text == "all":
        return most
    drawn = parse_distribution(text, remedy=SHORTER).sample(streams(seed).turns, count)
    return np.clip(drawn, 1, most)
