"""Laws fitted to the documents' measurements, and the profiles that ship with them.

    Inoue (2021), Table 1     H = alpha b + tau0,    H = b / throughput
                              c = beta b + c0,       c = power x H
    Yang et al., Table I      S = a n + c            n output tokens, alone on the device

Unweighted least squares, as the sources do it. In the profiles an image is a request of one token:
H at l = 1 is k3 b + k2 with k3 = alpha, k2 = tau0, so ask with --output-tokens
deterministic:value=1. Yang et al. say neither a nor c; their Fig. 2a holds other measurements than
Table I, and their printed delays ask for a = 0.0220, c = 0.78. The profile takes the whole table.
`python -m papers.measured_laws` writes the profiles anew.
"""

from __future__ import annotations

from pathlib import Path

from kendall.queueing.latency.energy import EnergyFit, fit_energy
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.profile import SHIPPED, Profile
from kendall.queueing.latency.regression import LineFit, fit_line
from papers.measurements import Measurement, load_measurement

YANG = "yang-llama2-7b-a100"
INOUE = ("inoue-v100", "inoue-p4")


def inoue_times(name: str) -> LineFit:
    """Batch time, seconds, over batch size: slope alpha, intercept tau0."""
    table = load_measurement(name)
    sizes, rates = table.column("batch_size"), table.column("images_per_second")
    return fit_line(sizes, [size / rate for size, rate in zip(sizes, rates, strict=True)])


def inoue_energy(name: str) -> EnergyFit:
    """Energy of a batch, joules, over batch size."""
    table = load_measurement(name)
    return fit_energy(
        table.column("batch_size"), table.column("watts"), table.column("images_per_second")
    )


def yang_times(input_tokens: float | None = None) -> LineFit:
    """Inference time, seconds, over output tokens: slope a, intercept c; all of the table, or
    the rows with that input.
    """
    cells = [
        cell
        for cell in load_measurement(YANG).cells()
        if input_tokens in (None, cell["input_tokens"])
    ]
    return fit_line([cell["output_tokens"] for cell in cells], [cell["seconds"] for cell in cells])


def document_profiles() -> dict[str, Profile]:
    """The shipped profiles by name, computed from the measurements."""
    profiles = {
        name: _profile(load_measurement(name), inoue_times(name), ("k3", "k2"), _INOUE_NOTE)
        for name in INOUE
    }
    profiles[YANG] = _profile(load_measurement(YANG), yang_times(), ("k4", "k2"), _YANG_NOTE)
    return profiles


_INOUE_NOTE = (
    "H = alpha b + tau0 by unweighted least squares on b / throughput; an image is a request of "
    "one token: use --output-tokens deterministic:value=1"
)
_YANG_NOTE = (
    "S = a n + c by unweighted least squares over all rows, one request at a time; the rows with "
    "128 input tokens alone give a = 0.02299, c = 0.186; the effect of batches was not measured: "
    "use --policy single"
)


def _profile(table: Measurement, line: LineFit, keys: tuple[str, str], note: str) -> Profile:
    slope, intercept = keys
    fitted = {slope: line.slope, intercept: line.intercept}
    times = [
        cell["seconds"] if "seconds" in cell else cell["batch_size"] / cell["images_per_second"]
        for cell in table.cells()
    ]
    errors = [
        abs(residual) / time for residual, time in zip(line.residuals.tolist(), times, strict=True)
    ]
    # 12 digits: the last ones depend on the linear algebra library, and the measurements have three
    # or four
    return Profile(
        name=table.name,
        law=LatencyModel(**{key: _digits(value) for key, value in fitted.items()}),
        intervals={
            key: (_digits(low), _digits(high))
            for key, (low, high) in zip(keys, line.intervals.values(), strict=True)
        },
        r2=_digits(line.r2),
        mape=_digits(sum(errors) / len(errors)),
        model=table.model,
        machine={"device": table.device},
        max_output_tokens=int(max(table.column("output_tokens")))
        if "output_tokens" in table.columns
        else 1,
        note=f"{note}. Source: {table.source}",
        cells=[dict(cell) for cell in table.cells()],
    )


def _digits(value: float) -> float:
    return float(f"{value:.12g}")


def save_profiles(folder: Path = SHIPPED) -> None:
    """Write them where shipped profiles lie."""
    for name, profile in document_profiles().items():
        profile.save(folder / f"{name}.json")


if __name__ == "__main__":
    save_profiles()
