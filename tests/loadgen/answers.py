"""Records of answers made by hand."""

from __future__ import annotations

from kendall.queueing.measurement.record import Record


def answered(
    index: int,
    at: float,
    late: float = 0.01,
    first: float = 0.1,
    gap: float = 0.02,
    tokens: int = 3,
    **more: object,
) -> Record:
    """Sent `late` after its instant, first token `first` after it, then one every `gap`;
    released with the last.
    """
    token_at = [at + first + gap * i for i in range(tokens)]
    given = {
        "request_id": str(index),
        "outcome": "completed",
        "intended_at": at,
        "sent_at": at + late,
        "first_byte_at": token_at[0] - 0.005,
        "first_token_at": token_at[0],
        "last_token_at": token_at[-1],
        "token_at": token_at,
        "released_at": token_at[-1],
        "sojourn_time": token_at[-1] - at,
        "queueing_delay": first / 2,
        "prompt_tokens": 10,
        "output_tokens": tokens,
    }
    return Record(**{**given, **more})  # type: ignore[arg-type]
