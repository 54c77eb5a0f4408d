"""A model name that vLLM cannot fetch is one line before the engine starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kendall.policies.text import SpecError
from kendall.queueing.errors import CommandError
from kendall.server.engines import hugging_face

huggingface_hub = pytest.importorskip("huggingface_hub", reason="comes with vLLM")


class Response:
    """As much of a response as the hub's errors want."""

    headers: dict[str, str] = {}
    status_code = 404
    request = None


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Sets what the hub does when it is asked for a file; the cache is empty."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)

    def set_to(error: BaseException | None) -> list[str]:
        asked: list[str] = []

        def metadata(url: str) -> None:
            asked.append(url)
            if error is not None:
                raise error

        monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", metadata)
        return asked

    return set_to


def complaint(model: str, tmp_path: Path, **engine_args: str) -> str:
    with pytest.raises((SpecError, CommandError)) as caught:
        hugging_face.check_name(model, {"download_dir": str(tmp_path), **engine_args})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_is_looked_at_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("./", str(tmp_path)):
        with pytest.raises(
            SpecError,
            match=r"a folder without config\.json; expected `tiny`, `smollm2`, a model directory",
        ):
            hugging_face.check_model(folder, {})
    with pytest.raises(SpecError, match="got an empty MODEL"):
        hugging_face.check_model("", {})
    with pytest.raises(SpecError, match="got model 'ftp://x'"):
        hugging_face.check_model("ftp://x", {})
    for name in ("tokenizer.json", "model.bin"):
        (tmp_path / name).touch()
    hugging_face.check_model("./", {"hf_config_path": "elsewhere"})
    (tmp_path / "config.json").write_text("{}")
    hugging_face.check_model("./", {})
    hugging_face.check_model("s3://bucket/model", {})


def test_a_name_that_the_hub_does_not_know(answers: Any, tmp_path: Path) -> None:
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    answers(RepositoryNotFoundError("401 Client Error\nmore", response=Response()))
    said = complaint("nosuchmodel", tmp_path)
    assert said.startswith(
        "got model 'nosuchmodel', which is neither a directory here nor on the Hugging Face Hub; "
        "expected `tiny`"
    )
    answers(GatedRepoError("403", response=Response()))
    assert "HF_TOKEN" in complaint("meta-llama/Llama-3.1-8B", tmp_path)
    answers(RevisionNotFoundError("404", response=Response()))
    assert "got revision 'v9'" in complaint("owner/name", tmp_path, revision="v9")


@pytest.mark.parametrize("model", ["smolm2", "SmolLM2", "smollm2-135m", "tinny"])
def test_nearly_the_name_of_a_model_that_is_made_here_is_said_first_without_asking(
    model: str, answers: Any, tmp_path: Path
) -> None:
    asked = answers(OSError("Name or service not known"))
    near = "tiny" if model.startswith("t") else "smollm2"
    said = complaint(model, tmp_path)
    assert said.startswith(f"got model {model!r}; did you mean {near!r}? expected `tiny`, ")
    assert asked == []


def test_with_an_owner_the_hub_is_asked_and_the_suggestion_comes_before_what_is_expected(
    answers: Any, tmp_path: Path
) -> None:
    asked = answers(OSError("no route"))
    said = complaint("HuggingFaceTB/SmolLM2-135M", tmp_path)
    assert said.endswith(
        "(no route); did you mean 'smollm2'? expected `tiny`, `smollm2`, a model directory, or a "
        "model name on the Hugging Face Hub"
    )
    assert len(asked) == 1


def test_a_hub_that_cannot_be_reached(
    answers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(OSError("Name or service not known\nmore"))
    with pytest.raises(CommandError):  # the arguments may be right
        hugging_face.check_name("owner/name", {"download_dir": str(tmp_path)})
    assert "the Hugging Face Hub cannot be reached (Name or service not known)" in complaint(
        "owner/name", tmp_path
    )
    asked = answers(None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE is set" in complaint("owner/name", tmp_path)
    assert asked == []


@pytest.mark.parametrize(
    "model", ["./nosuch", "/nosuch", "a/b/c", "-x", "a b", "x" * 97, "a--b", "owner/"]
)
def test_what_cannot_be_a_name_is_not_asked_for(model: str, answers: Any, tmp_path: Path) -> None:
    asked = answers(None)
    assert "which is not a directory here" in complaint(model, tmp_path)
    assert asked == []


def test_what_the_hub_or_the_cache_has_passes(
    answers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answers(None)
    hugging_face.check_name("owner/name", {"download_dir": str(tmp_path)})
    assert asked == ["https://huggingface.co/owner/name/resolve/main/config.json"]
    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda *_, **__: "/cache/config.json"
    )
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hugging_face.check_name("owner/name", {})
    assert len(asked) == 1


def test_other_sources_are_left_to_vllm(answers: Any) -> None:
    asked = answers(OSError("never"))
    hugging_face.check_name("s3://bucket/model", {})
    hugging_face.check_name("owner/name:Q4_K_M", {})
    hugging_face.check_name("owner/name", {"load_format": "runai_streamer"})
    assert asked == []


def test_a_model_without_a_configuration_file_is_left_to_vllm(answers: Any, tmp_path: Path) -> None:
    from huggingface_hub.errors import RemoteEntryNotFoundError

    answers(RemoteEntryNotFoundError("404", response=Response()))
    hugging_face.check_name("owner/name", {"download_dir": str(tmp_path)})


def test_only_local_models_forbid_the_engine_to_ask_the_hub(tmp_path: Path) -> None:
    """`prepare` without a model once set HF_HUB_OFFLINE for every model: no name could be
    fetched.
    """
    from kendall.server.engines.vllm.process import environment_of

    assert (
        environment_of("tiny")["HF_HUB_OFFLINE"]
        == environment_of(str(tmp_path))["HF_HUB_OFFLINE"]
        == "1"
    )
    assert "HF_HUB_OFFLINE" not in environment_of("owner/name")
    assert "HF_HUB_OFFLINE" not in environment_of("")
