"""The cells of the GPU bench before `transformers serve`, and its model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.gpu.design import PRESETS
from bench.gpu_served import (
    LENGTHS,
    PROMPTS,
    Live,
    ServedModel,
    cells,
    make_model,
    parser,
    rate_at,
)
from kendall import largest_stable_rate
from kendall.queueing.latency.law import parse_law
from kendall.queueing.latency.profile import Profile


def test_every_policy_is_measured_at_every_load() -> None:
    options = parser().parse_args(["--slots", "8", "--loads", "0.5,0.7"])
    assert list(cells(options)) == [
        ("continuous:max_batch_size=8", 0.5),
        ("capped:max_batch_size=8", 0.5),
        ("continuous:max_batch_size=8", 0.7),
        ("capped:max_batch_size=8", 0.7),
    ]


def test_the_rate_of_a_cell_is_that_of_unpadded_batches(tmp_path: Path) -> None:

    law = tmp_path / "law.json"
    Profile(name="x", law=parse_law("k1=0.001,k2=0.02,k3=0.001,k4=0.02")).save(law)
    given = {"max_num_seqs": 8, "prompt_tokens": PROMPTS}
    unpadded = largest_stable_rate("elastic:max_batch_size=8", LENGTHS, str(law), **given)
    options = parser().parse_args(["--folder", str(tmp_path), "--slots", "8"])
    model = ServedModel(options, None, tmp_path)  # type: ignore[arg-type]  # nobody asks the server
    assert model.rate("capped:max_batch_size=8", 0.5) == pytest.approx(unpadded / 2)
    whole = largest_stable_rate("continuous:max_batch_size=8", LENGTHS, str(law), **given)
    assert model.rate("continuous:max_batch_size=8", 0.7) == pytest.approx(0.7 * whole)


def test_no_loads_are_a_calibration_alone() -> None:
    assert list(cells(parser().parse_args(["--loads", ""]))) == []


def test_a_rate_follows_what_was_seen_and_else_the_guess() -> None:
    """An engine 1.5 times slower than its law has a load of 0.75 where 0.5 was meant."""
    seen: Live = {"prediction": {"arrival_rate": 10.0, "load": 0.75}}
    assert rate_at(0.5, 10.0, seen) == pytest.approx(10.0 / 1.5)
    nothing: list[Live | None] = [None, {}, {"prediction": None, "reason": "2 requests"}]
    assert [rate_at(0.5, 7.0, live) for live in nothing] == [7.0, 7.0, 7.0]


def test_a_cell_that_fails_leaves_the_others_to_another_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: Live = {"prediction": {"arrival_rate": 10.0, "load": 0.5, "n": 9, "speed": 1.0}}
    asked: list[tuple[str, float, float]] = []

    def cell(_: ServedModel, policy: str, load: float, guess: float) -> Live:
        asked.append((policy, load, guess))
        if policy == "capped":
            raise RuntimeError("the gateway did not come up")
        return seen

    monkeypatch.setattr(ServedModel, "cell", cell)
    monkeypatch.setattr(ServedModel, "rate", lambda *_: 3.0)
    options = parser().parse_args(["--folder", str(tmp_path)])
    model = ServedModel(options, None, tmp_path)  # type: ignore[arg-type]  # nobody asks the server
    left = [("continuous", 0.5), ("capped", 0.5), ("continuous", 0.75)]
    known: dict[str, Live] = {}
    said: list[str] = []
    model.serve(left, known, said.append)
    assert left == [("continuous", 0.75)]
    assert said[-1] == "capped, 0.5: the gateway did not come up"
    model.serve(left, known, said.append)
    assert left == []
    assert asked == [("continuous", 0.5, 3.0), ("capped", 0.5, 3.0), ("continuous", 0.75, 15.0)]


@pytest.mark.slow
def test_the_model_is_in_a_cache_and_never_ends_an_answer(tmp_path: Path) -> None:
    from huggingface_hub import scan_cache_dir
    from transformers import AutoModelForCausalLM, AutoTokenizer

    snapshot = make_model(tmp_path, PRESETS["tiny"], "cpu")
    (repository,) = scan_cache_dir(tmp_path / "hub").repos
    assert repository.repo_id == "random/llama"
    assert list(repository.refs) == ["main"]
    assert json.loads((snapshot / "config.json").read_text())["eos_token_id"] is None
    model = AutoModelForCausalLM.from_pretrained(snapshot)
    prompt = AutoTokenizer.from_pretrained(snapshot)("the the", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=40, do_sample=False)
    assert answer.shape[1] == prompt["input_ids"].shape[1] + 40
