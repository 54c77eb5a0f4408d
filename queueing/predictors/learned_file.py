"""A learned length predictor in a file: an `.npz` of hashes, weights and quantiles of errors, no
text.
"""

from __future__ import annotations

import math
import os
import zipfile
from pathlib import Path

import numpy as np

from kendall.policies.text import SpecError
from kendall.queueing.predictors.learned import (
    BUCKET_BITS,
    LEVELS,
    ErrorLaws,
    LearnedLengths,
    Regression,
)

SCHEMA_VERSION = 1
_NUMBERS = ("answers", "intercept", "tau", "loss", "plain_loss", "version", "schema_version")
_VECTORS = ("buckets", "idf", "weights", "centres")


def before_its_place(path: Path) -> Path:
    """The file that is written, and then renamed."""
    return path.with_name(path.name + ".new")


def save_model(path: Path, model: LearnedLengths, version: int) -> None:
    """Whole or not at all. Raises OSError."""
    known = np.flatnonzero(model.regression.idf)
    new = before_its_place(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with new.open("wb") as file:
        np.savez(
            file,
            allow_pickle=False,
            schema_version=SCHEMA_VERSION,
            version=version,
            answers=model.answers,
            intercept=model.regression.intercept,
            buckets=known.astype(np.uint32),
            idf=model.regression.idf[known],
            weights=model.regression.weights[known],
            centres=model.errors.centres,
            quantiles=model.errors.quantiles,
            tau=model.tau,
            loss=model.loss,
            plain_loss=model.plain_loss,
        )
    os.replace(new, path)


def load_model(path: Path) -> tuple[LearnedLengths, int]:
    """The model and its version. Raises OSError (FileNotFoundError where there is none) and
    SpecError for a file that is no such model.
    """
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            number = {name: float(file[name]) for name in _NUMBERS}
            vector = {name: np.asarray(file[name], dtype=float) for name in _VECTORS}
            quantiles = np.asarray(file["quantiles"], dtype=float)
    except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise SpecError(f"not a file of a length predictor: {error}") from None
    if number["schema_version"] != SCHEMA_VERSION:
        raise SpecError(f"got schema {number['schema_version']:g}, expected {SCHEMA_VERSION}")
    buckets, centres = vector["buckets"], vector["centres"]
    fits = (
        all(np.isfinite(each).all() for each in (*vector.values(), quantiles))
        and all(map(math.isfinite, number.values()))
        and all(each.ndim == 1 and len(each) for each in vector.values())
        and len(buckets) == len(vector["idf"]) == len(vector["weights"])
        and (buckets >= 0).all()
        and (buckets < 1 << BUCKET_BITS).all()
        and quantiles.shape == (len(centres), len(LEVELS))
        and (np.diff(quantiles, axis=1) >= 0).all()
    )
    if not fits:
        raise SpecError("its numbers are not those of a length predictor")
    dense = np.zeros((2, 1 << BUCKET_BITS))
    dense[:, buckets.astype(int)] = vector["idf"], vector["weights"]
    model = LearnedLengths(
        int(number["answers"]),
        Regression(number["intercept"], *dense),
        ErrorLaws(centres, quantiles),
        tau=number["tau"],
        loss=number["loss"],
        plain_loss=number["plain_loss"],
    )
    return model, int(number["version"])
