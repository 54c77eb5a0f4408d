"""The cells of the GPU bench before `transformers serve`, and its model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.gpu.design import PRESETS
from bench.gpu_served import LENGTHS, PROMPTS, cells, make_model, parser, rate_of
from kendall import largest_stable_rate
from queueing.latency.law import parse_law
from queueing.latency.profile import Profile


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
    assert rate_of("capped:max_batch_size=8", 0.5, law, 8) == pytest.approx(unpadded / 2)
    whole = largest_stable_rate("continuous:max_batch_size=8", LENGTHS, str(law), **given)
    assert rate_of("continuous:max_batch_size=8", 0.7, law, 8) == pytest.approx(0.7 * whole)


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
