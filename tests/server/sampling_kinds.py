"""Every kind of sampling, by what a preemption may do to it: bodies of calls."""

from __future__ import annotations

from typing import Any

Body = dict[str, Any]
PLAIN: Body = {"temperature": 0}
EXACT: dict[str, Body] = {
    "greedy": PLAIN,
    "repetitions less likely": PLAIN | {"repetition_penalty": 1.2},
    "a stop string": PLAIN | {"stop": ["zz"], "include_stop_str_in_output": True},
    "stop tokens": PLAIN | {"stop_token_ids": list(range(300, 340))},
    "at least so many tokens": PLAIN
    | {"min_tokens": 12, "stop_token_ids": list(range(300, 500)), "ignore_eos": False},
    "biased logits": PLAIN | {"logit_bias": {"400": 0.05, "401": -1.0}},
    "some tokens only": PLAIN | {"allowed_token_ids": list(range(300, 360))},
    "log probabilities": PLAIN | {"logprobs": 2},
    "special tokens too": PLAIN | {"skip_special_tokens": False},
    "greedy, whatever else cuts": PLAIN | {"top_p": 0.9, "top_k": 50, "min_p": 0.01, "seed": 3},
}
# a draw of the same law, not the same draw
SAMPLED: dict[str, Body] = {
    "sampled": {"temperature": 1.0},
    "sampled from few": {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "min_p": 0.01},
}
KEPT: dict[str, Body] = {
    "a seed": {"temperature": 1.0, "seed": 7},
    "fewer of those present": PLAIN | {"presence_penalty": 0.5},
    "fewer of the frequent": PLAIN | {"frequency_penalty": 0.5},
    "no bad words": PLAIN | {"bad_words": ["th"]},
    "a form": PLAIN | {"structured_outputs": {"choice": ["yes", "no"]}},
}


def named() -> set[str]:
    """Parameters that some kind sets."""
    return {name for kinds in (EXACT, SAMPLED, KEPT) for body in kinds.values() for name in body}
