"""lm-evaluation-harness' `local-completions` against the gateway, on the real engine: a task that
compares log probabilities and one that generates.

The model is random: the gateway is asked first, and the tasks are written so that the scores are
known. The last document of each has a wrong answer.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kendall.queueing.measurement.record import Record, call_of
from tests.server.openai_tools.tooled import Served, serving

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]
CHOICE, TEXT = "kendall_choice", "kendall_text"
QUESTIONS = {
    "The rain in": ["Spain", "the north of France", "it"],
    "What about the weather in Rome?": ["It is sunny.", "It will rain.", "No one knows."],
    "One, two, three and": ["four", "five", "many more"],
}
TOKENS, UNTIL = 8, ["\n\n"]
# arguments of the model and the number of prompts in a call
WAYS = {
    "tokens, one call at a time": ("num_concurrent=1", 1),
    "texts, concurrent calls of two": ("num_concurrent=3,tokenized_requests=False", 2),
}


@pytest.fixture(scope="module")
def served(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("lm_eval")
    precise = ("--engine-arg", "dtype=float32")  # the same values however calls are batched
    with serving(folder, "--policy", "continuous:max_batch_size=4", *precise) as it:
        yield it


def completed(served: Served, **body: Any) -> Any:
    """The one choice of a completion."""
    answer = served.post("/v1/completions", {"model": "tiny", "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return choice


def loglikelihood(served: Served, context: str, continuation: str) -> float:
    """By the echo of both."""
    echo = completed(served, prompt=context + continuation, max_tokens=0, echo=True, logprobs=1)
    logprobs = echo["logprobs"]
    by_offset = zip(logprobs["text_offset"], logprobs["token_logprobs"], strict=True)
    return math.fsum(value for offset, value in by_offset if offset >= len(context))


def choice_documents(served: Served) -> list[dict[str, Any]]:
    """Whose answer is the choice that is likeliest, but for the last."""
    documents: list[dict[str, Any]] = []
    for question, choices in QUESTIONS.items():
        values = [loglikelihood(served, question, " " + choice) for choice in choices]
        best = values.index(max(values))
        documents.append({"question": question, "choices": choices, "answer": best})
    documents[-1]["answer"] = (documents[-1]["answer"] + 1) % len(documents[-1]["choices"])
    return documents


def text_documents(served: Served) -> list[dict[str, Any]]:
    """Whose answer is what the model writes, but for the last."""
    documents = [
        {
            "question": question,
            "answer": completed(served, prompt=question, max_tokens=TOKENS, stop=UNTIL)["text"],
        }
        for question in QUESTIONS
    ]
    documents[-1]["answer"] = "something else"
    return documents


def write_task(folder: Path, name: str, documents: list[dict[str, Any]], **fields: Any) -> None:
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in documents), encoding="utf-8")
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "question",
        "doc_to_target": "answer",
    }
    (folder / f"{name}.yaml").write_text(json.dumps(task | fields), encoding="utf-8")


def write_tasks(served: Served, folder: Path) -> None:
    write_task(
        folder,
        CHOICE,
        choice_documents(served),
        output_type="multiple_choice",
        doc_to_choice="choices",
        metric_list=[{"metric": "acc"}],
    )
    write_task(
        folder,
        TEXT,
        text_documents(served),
        output_type="generate_until",
        generation_kwargs={"until": UNTIL, "max_gen_toks": TOKENS, "temperature": 0},
        metric_list=[{"metric": "exact_match"}],
    )


def run(program: Path, served: Served, folder: Path, way: str) -> Path:
    """The folder of what it wrote. A call that fails is not sent again, and so fails the run."""
    options, prompts = WAYS[way]
    url = f"{served.process.url}/v1/completions"
    tokenizer = served.folder / "tooled"
    arguments = {
        "--model": "local-completions",
        "--model_args": f"model=tiny,base_url={url},tokenizer={tokenizer},max_retries=1,{options}",
        "--batch_size": str(prompts),
        "--tasks": f"{CHOICE},{TEXT}",
        "--include_path": str(folder),
        "--output_path": str(folder / "out"),
    }
    words = [each for pair in arguments.items() for each in pair]
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE"), "1")
    done = subprocess.run(
        [str(program), "run", "--log_samples", *words],
        env=os.environ | offline | {"HF_HOME": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = (folder / "out").rglob("results_*.json")
    return results.parent


def samples_of(written: Path, task: str) -> list[dict[str, Any]]:
    """In the order of the documents."""
    (file,) = written.glob(f"samples_{task}_*.jsonl")
    lines = file.read_text(encoding="utf-8").splitlines()
    return sorted(map(json.loads, lines), key=lambda sample: int(sample["doc_id"]))


@dataclass(frozen=True)
class Evaluation:
    """One run of both tasks: what lm_eval wrote, and the gateway's records of it."""

    results: dict[str, Any]
    choices: list[dict[str, Any]]
    texts: list[dict[str, Any]]
    records: list[Record]
    prompts: int  # in a call


@pytest.fixture(scope="module", params=WAYS)
def evaluation(
    request: pytest.FixtureRequest,
    served: Served,
    programs: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Evaluation:
    folder = tmp_path_factory.mktemp("evaluation")
    write_tasks(served, folder)
    before = len(served.records())
    written = run(programs / "lm_eval", served, folder, request.param)
    records = served.records()[before:]
    (file,) = written.glob("results_*.json")
    results = json.loads(file.read_text(encoding="utf-8"))["results"]
    choices, texts = samples_of(written, CHOICE), samples_of(written, TEXT)
    return Evaluation(results, choices, texts, records, WAYS[request.param][1])


def test_every_document_has_the_score_of_the_gateways_own_answer(evaluation: Evaluation) -> None:
    assert [sample["acc"] for sample in evaluation.choices] == [1, 1, 0]
    assert [sample["exact_match"] for sample in evaluation.texts] == [1, 1, 0]
    assert evaluation.results[CHOICE]["acc,none"] == pytest.approx(2 / 3)
    assert evaluation.results[TEXT]["exact_match,none"] == pytest.approx(2 / 3)


def test_the_gateway_serves_each_prompt_that_lm_eval_sends_once(evaluation: Evaluation) -> None:
    sent = {
        1: sum(len(sample["arguments"]) for sample in evaluation.choices),  # a token and the echo
        TOKENS: sum(len(sample["arguments"]) for sample in evaluation.texts),
    }
    assert sent == {1: 9, TOKENS: 3}
    assert Counter(record.max_output_tokens for record in evaluation.records) == sent
    assert {record.outcome for record in evaluation.records} == {"completed"}
    calls = {call_of(record.request_id) for record in evaluation.records}
    assert len(calls) == sum(math.ceil(number / evaluation.prompts) for number in sent.values())


def test_its_log_likelihoods_are_those_of_a_direct_call(
    served: Served, evaluation: Evaluation
) -> None:
    for sample in evaluation.choices:
        pairs = zip(sample["arguments"].values(), sample["resps"], strict=True)
        for arguments, ((value, _greedy), *_) in pairs:
            direct = loglikelihood(served, arguments["arg_0"], arguments["arg_1"])
            assert float(value) == pytest.approx(direct, abs=1e-3)
