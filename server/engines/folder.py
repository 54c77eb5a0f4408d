"""What a model folder holds, looked at before vLLM starts: its own answer to a wrong one is a
traceback after a minute.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

EXPECTED = "expected `tiny`, `smollm2`, a model directory, or a model name on the Hugging Face Hub"
CONFIG, INDEX = "config.json", "model.safetensors.index.json"
CONFIGURATIONS = (CONFIG, "params.json")  # the second is Mistral's own format
JSON_FILES = (CONFIG, "generation_config.json", "tokenizer_config.json", INDEX)
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "tekken.json",
    "vocab.txt",
    "spiece.model",
    "tiktoken.model",
)
WEIGHTS = ("*.safetensors", "*.bin", "*.pt")  # that vLLM reads unless it is told another format
NO_WEIGHTS = ("training_args", "optimizer", "scheduler", "scaler")  # *.bin of a training
_LAYER = re.compile(r"^(.*?\.)?(?:layers?|h)\.(\d+)\.")  # of a tensor's name
_INDEXED = re.compile(r"\.\d+\.")
_FURTHER = ("nextn", "mtp")  # in names of fields: layers beyond num_hidden_layers that predict more


def fault_of(model: str, engine_args: Mapping[str, Any]) -> str | None:
    """What is wrong with a model folder, in one line; None where vLLM may find all that it needs.
    The weights are looked at only in the formats that vLLM takes by itself.
    """
    folder = Path(model)
    own = {key.lstrip("-").replace("-", "_"): value for key, value in engine_args.items()}
    described = any((folder / name).is_file() for name in CONFIGURATIONS)
    if not (described or "hf_config_path" in own or "load_format" in own):
        return f"got model {model!r}, a folder without {CONFIG}; {EXPECTED}"
    if (fault := _no_json(folder, {CONFIG} if "hf_config_path" in own else ())) is not None:
        return fault
    if "tokenizer" not in own and not any((folder / name).exists() for name in TOKENIZER_FILES):
        return (
            f"got model {model!r}, a folder without a tokenizer (tokenizer.json, tokenizer.model, "
            "...); expected one, or --engine-arg tokenizer=PATH"
        )
    if own.get("load_format") not in (None, "auto"):
        return None
    return _wrong_weights(folder, config_counts=not own.keys() & {"hf_config_path", "hf_overrides"})


def _no_json(folder: Path, others: Collection[str]) -> str | None:
    for path in (folder / name for name in JSON_FILES if name not in others):
        if not path.is_file():
            continue
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            reason = None if isinstance(content, dict) else "it holds another value"
        except (OSError, ValueError, RecursionError) as error:
            reason = str(error) or type(error).__name__
        if reason is not None:
            return (
                f"got {path}, which cannot be read as a JSON object ({reason}); expected one: "
                "correct the file, or copy it again from the model's source"
            )
    return None


def _wrong_weights(folder: Path, *, config_counts: bool) -> str | None:
    files = [
        path
        for pattern in WEIGHTS
        for path in folder.glob(pattern)
        if not path.name.startswith(NO_WEIGHTS)
    ]
    if not files:
        return (
            f"got model '{folder}', a folder without weights (*.safetensors, *.bin); expected "
            "them, or --engine-arg load_format=dummy for random ones"
        )
    try:
        names = tensor_names(folder)
    except ValueError as error:
        return f"{error}; expected the whole file: fetch it again"
    return _wrong_layers(folder, names) if config_counts else None


def _wrong_layers(folder: Path, names: Iterable[str]) -> str | None:
    path = folder / CONFIG
    config = config_of(folder)
    says, held = config.get("num_hidden_layers"), _layers(names)
    if says is None or not held:
        return None
    # beside a tower of other inputs, or with layers that predict more, there may be more of them
    exact = len(held) == 1 and not any(part in key for key in config for part in _FURTHER)
    most = max(held.values())
    if says == most or (isinstance(says, int) and says < most and not exact):
        return None
    return (
        f"got {says!r} layers in {path} (num_hidden_layers); expected the {most} that the weights "
        f"hold: set it to {most}, or copy the file that belongs to the weights"
    )


def _layers(names: Iterable[str]) -> dict[str, int]:
    """How many there are below each prefix of tensors' names; those inside of other numbered parts
    are no layers of the model.
    """
    held: dict[str, int] = {}
    for name in names:
        found = _LAYER.match(name)
        if found is not None and not _INDEXED.search(found[1] or ""):
            prefix, count = found[1] or "", int(found[2]) + 1
            held[prefix] = max(count, held.get(prefix, 0))
    return held


def config_of(folder: Path) -> dict[str, Any]:
    """The fields of its config.json, the text model's own among them; none without the file."""
    path = folder / CONFIG
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return config | (config.get("text_config") or {})


def weight_files(folder: Path) -> list[Path]:
    """The files of weights that vLLM reads, of a folder that may have them in two formats."""
    for pattern in ("model*.safetensors", "*.safetensors", "*.bin"):
        if paths := sorted(folder.glob(pattern)):
            return paths
    return []


def tensor_names(folder: Path) -> set[str]:
    """Of its weights in safetensors; none in other formats. Raises ValueError for a file that is
    not whole.
    """
    paths = [path for path in weight_files(folder) if path.suffix == ".safetensors"]
    return {name for path in paths for name in safetensors_header(path)}


def safetensors_header(path: Path) -> dict[str, Any]:
    """What the file says of each tensor. Raises ValueError where it has no such header, or less
    than the tensors in it.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            data = path.stat().st_size - 8 - length
            header = json.loads(file.read(length)) if data >= 0 else None
    except (OSError, ValueError) as error:
        raise ValueError(f"got {path}, which cannot be read as safetensors ({error})") from None
    if isinstance(header, dict):
        found = {name: entry for name, entry in header.items() if name != "__metadata__"}
        offsets = [each.get("data_offsets") for each in found.values() if isinstance(each, dict)]
        ends = [each[1] for each in offsets if isinstance(each, list) and len(each) == 2]
        if max((end for end in ends if isinstance(end, int)), default=0) <= data:
            return found
    raise ValueError(
        f"got {path}, which is no whole safetensors file (a download that broke off, or a "
        "pointer of Git LFS)"
    )
