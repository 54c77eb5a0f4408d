"""The functions behind `import kendall`: what `kendall predict` and `kendall simulate` compute.

Times are seconds, rates are requests per second, lengths are tokens. Every function takes and
returns single values, no arrays, and does not modify its arguments. Three arguments are texts in
the grammar of the command line, or what the parser of that text returns:

policy          when waiting requests start, and how many together: "capped:max_batch_size=8"
                (`parse_policy`)
output_tokens   distribution of the output tokens of a request: "lognormal:mu=5,sigma=0.7"
                (`parse_distribution`)
latency         service time of a batch: "k1=..,k2=..,k3=..,k4=.." or "a=..,c=.." in seconds, or
                the name or path of a profile (`parse_latency`)

Errors:

SpecError (a ValueError)    an argument is wrong; the message says what it was and what is expected
PredictionError             the arguments are right, but there is no answer
  +- UnstableQueueError     more arrives than the policy can serve; `.load` is 1 or more
  +- NotConvergedError      the numerical method missed its accuracy; `.residual` is what remained
"""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from kendall.policies.core import Policy
from kendall.policies.text import SpecError, parse_policy
from kendall.queueing.description.arguments import Limits
from kendall.queueing.distributions.token_distribution import TokenDistribution, parse_distribution
from kendall.queueing.errors import NotConvergedError, PredictionError, UnstableQueueError
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.profile import load_law
from kendall.queueing.prediction.query import PredictionQuery
from kendall.queueing.queue import Queue
from kendall.queueing.result import Mean, Number, Prediction, Quantiles

__all__ = [
    "LatencyModel",
    "Limits",
    "Mean",
    "NotConvergedError",
    "Number",
    "Policy",
    "Prediction",
    "PredictionError",
    "Quantiles",
    "SpecError",
    "TokenDistribution",
    "UnstableQueueError",
    "largest_stable_rate",
    "model_text",
    "parse_distribution",
    "parse_latency",
    "parse_policy",
    "predict",
    "simulate",
]


class PredictionOptions(Limits, total=False):
    """The limits of the queue, and a recorded trace that is replayed in place of drawn requests."""

    trace: Path | str | None


def predict(
    policy: Policy | str,
    arrival_rate: float | None = None,
    output_tokens: TokenDistribution | str | None = None,
    latency: LatencyModel | str | None = None,
    *,
    method: str = "auto",
    **options: Unpack[PredictionOptions],
) -> Prediction:
    """The steady state of a queue under a policy: the object that `kendall predict --json` prints.

    Requests come in one of three ways: by a Poisson process at `arrival_rate` (with gaps of another
    variation where the option `arrival_scv` says so); by the option `arrivals`, a text of `kendall
    load --arrivals`, which has its own mean rate; or from the option `trace`, the path of a
    recorded trace, which has its own output lengths too and is replayed.

    options  `trace`, and the limits max_output_tokens, patience, servers, max_num_seqs,
             prompt_tokens, arrivals, ... (see `Limits`)
    method   "exact", "approximation", "bound", "paper" or "simulation"; "auto" is the most accurate
             one that this queue has. Values that the method cannot give are None

    Raises SpecError, also where `method` has no answer for this queue; UnstableQueueError;
    NotConvergedError, not under "auto".

    >>> law = "k1=0.001,k2=0.004,k3=0.0001,k4=0.002"
    >>> answer = predict("capped:max_batch_size=8", 20, "uniform:low=8,high=24", law)
    >>> answer.model, answer.method
    ('M/G^[1,8]/1', 'exact')
    >>> delay = answer.queueing_delay
    >>> f"load {answer.load:.3f}: mean {delay.mean:.4f} s, p99 {delay.p99:.4f} s"
    'load 0.186: mean 0.0139 s, p99 0.0516 s'
    """
    query = PredictionQuery.read(
        policy, latency, arrival_rate=arrival_rate, output_tokens=output_tokens, **options
    )
    return query.predict(method)


def simulate(
    policy: Policy | str,
    arrival_rate: float | None = None,
    output_tokens: TokenDistribution | str | None = None,
    latency: LatencyModel | str | None = None,
    *,
    num_requests: int | None = None,
    seed: int = 0,
    replications: int = 1,
    **options: Unpack[PredictionOptions],
) -> Prediction:
    """An event-driven simulation of a queue under a policy: the object that `kendall simulate
    --json` prints. Arguments and options are those of `predict`. Each mean has a `standard_error`,
    but where a trace is replayed once.

    num_requests  of each replication, at least 40; the first tenth is warm-up (100,000). A trace is
                  replayed whole
    seed          one seed gives the same arrivals and lengths under every policy
    replications  independent runs

    Raises SpecError, UnstableQueueError.

    >>> run = simulate("single", 0.5, "deterministic:value=100", "a=0.01,c=0", num_requests=20_000)
    >>> delay = run.queueing_delay  # M/D/1 with service 1 s at load 0.5
    >>> abs(delay.mean - 0.5) < 4 * delay.standard_error
    True
    """
    query = PredictionQuery.read(
        policy, latency, arrival_rate=arrival_rate, output_tokens=output_tokens, **options
    )
    return query.simulate(num_requests, seed=seed, replications=replications)


def model_text(
    policy: Policy | str,
    arrival_rate: float | None = None,
    output_tokens: TokenDistribution | str | None = None,
    latency: LatencyModel | str | None = None,
    **options: Unpack[PredictionOptions],
) -> str:
    """The queue that `predict` has of these arguments, in Kendall's notation, then a line for each
    part in words: what `kendall predict --model-text` prints. Raises SpecError.

    >>> law = "k1=0.001,k2=0.004,k3=0.0001,k4=0.002"
    >>> model_text("capped:max_batch_size=8", 20, "uniform:low=8,high=24", law).splitlines()[0]
    'M/G^[1,8]/1'
    """
    return PredictionQuery.read(
        policy, latency, arrival_rate=arrival_rate, output_tokens=output_tokens, **options
    ).model_text


def largest_stable_rate(
    policy: Policy | str,
    output_tokens: TokenDistribution | str,
    latency: LatencyModel | str,
    **limits: Unpack[Limits],
) -> float:
    """The arrival rate, requests per second, below which the queue of a policy is stable: its load
    there is 1.

    `limits` as for `predict`. Raises SpecError.

    >>> largest_stable_rate("single", "deterministic:value=100", "a=0.01,c=0")
    1.0
    """
    return Queue.read(policy, output_tokens, latency, **limits).largest_stable_rate


def parse_latency(text: str) -> LatencyModel:
    """The latency law of a text, or of a profile by its name or path. Raises SpecError.

    >>> law = parse_latency("k1=0.001,k2=0.004,k3=0.0001,k4=0.002")
    >>> f"{law.padded(batch_size=4, longest=10):.3f}"  # k1 b + k2 + (k3 b + k4) l, seconds
    '0.032'
    """
    return load_law(text)
