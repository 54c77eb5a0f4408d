"""How a run makes its answers as long as it drew them, by what the server accepts.

natural       only max_tokens: the model ends the answer
forced        Kendall's sealed field, which no policy can see; one max_tokens for all requests
ignore_eos    vLLM's field, with each request's own length as max_tokens
"""

from __future__ import annotations

import dataclasses

from loadgen.sending.client.endpoint import Endpoint
from loadgen.sending.client.target import FORCED_FIELD, LoadError, Target


def with_lengths(target: Target, endpoint: Endpoint) -> tuple[Target, str | None]:
    """The target with drawn lengths enforced in a way that the server accepts, and a note where
    policies can see them.

    Raises LoadError where it accepts none.
    """
    fields = endpoint.length_fields
    if fields is not None and FORCED_FIELD in fields:
        return target, None
    if fields is not None and "ignore_eos" not in fields:
        raise LoadError(
            f"{target.base_url} lets no request set the length of its answer; expected "
            "--natural-lengths, which sends only max_tokens"
        )
    why = (
        "this gateway runs without --allow-forced-lengths"
        if endpoint.kendall
        else "this server does not say that it is a Kendall gateway"
    )
    return dataclasses.replace(
        target, ignore_eos=True
    ), f"{why}; each request carries ignore_eos and its drawn length as max_tokens"
