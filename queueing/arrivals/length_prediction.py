"""Predicted output lengths that are sent along with the requests, with a named error: the texts and
the laws of `kendall predict --predictor` (queueing.predictors.predictor_text).

A bit is sent as a number: half the threshold for "not above", twice the threshold for "above",
whatever the lengths; the numbers carry the bit and nothing more. The exponential model is the
standard one of the theory of queues with predictions (Mitzenmacher and Shahout 2025, "Queueing,
Predictions, and LLMs: Challenges and Open Problems"), the single bit that of Mitzenmacher's "Queues
with Small Advice" (2021).

A prediction is a whole number >= 1: a continuous draw is rounded to the nearest. No model looks at
any other request, so a longer run begins as the shorter one did. The predictor does not know the
limit of a request; whoever reads its prediction caps it there.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kendall.queueing.predictors.predictor_text import (
    NO_PREDICTION,
    PredictorText,
    parse_predictor,
)

IntArray = NDArray[np.int64]
UNLIMITED = 2**53  # tokens: no prediction is cut
OLD_NAMES = {"one_bit": "onebit"}


def parse_length_prediction(text: str) -> PredictorText:
    """The predictor that a text names; an old name of one is read too. Raises SpecError."""
    name, colon, rest = text.partition(":")
    return parse_predictor(OLD_NAMES.get(name.strip(), name) + colon + rest)


def predict_lengths(
    predictor: PredictorText, rng: np.random.Generator, output_tokens: IntArray
) -> IntArray | None:
    """A prediction for each true length; None where nothing is predicted. Does not modify."""
    if predictor == NO_PREDICTION:
        return None
    from kendall.queueing.models.soap.token_orders import predicted_tokens  # noqa: PLC0415 - scipy, which a sender without predictions need not wait for

    drawn = predicted_tokens(predictor, rng, output_tokens.astype(float), UNLIMITED)
    return np.asarray(drawn, dtype=np.int64)
