"""What MODEL is: a model that is made here, a folder, or a name that vLLM can fetch, asked before
the engine starts: vLLM's own answer is a traceback after 20 seconds.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kendall.policies.text import SpecError, suggest
from kendall.queueing.errors import CommandError
from kendall.server.engines.folder import CONFIG, EXPECTED, fault_of

_PART = r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9_])?"
_NAME = re.compile(
    rf"(?!.*(?:--|\.\.))(?=.{{1,96}}$){_PART}(?:/{_PART})?"
)  # OWNER/NAME, or NAME alone as the oldest models have it
_OTHER_SOURCES = ("load_format", "hf_config_path")  # vLLM may then need no file of the hub
_STORES = ("s3://", "gs://", "az://")  # that vLLM reads models from
FILE = CONFIG
MADE_HERE = ("tiny", "smollm2")


def folder_of(model: str) -> str:
    """What vLLM loads: the folder of a model that is made here, once it is made, else the text as
    it is.

    Raises CommandError where it cannot be made.
    """
    if model == "tiny":
        from kendall.server.engines.tiny import make_tiny  # noqa: PLC0415 - only where it is asked for

        return str(make_tiny())
    if model == "smollm2":
        from kendall.server.engines.smollm2 import make_smollm2  # noqa: PLC0415

        return str(make_smollm2())
    return model


def check_model(model: str, engine_args: Mapping[str, Any]) -> None:
    """Whether vLLM can find the model, folder or name, asked before anything is started. Raises
    SpecError, CommandError.
    """
    if model in MADE_HERE:
        return
    if not model.strip():
        raise SpecError(f"got an empty MODEL; {EXPECTED}")
    if "://" in model and not model.startswith(_STORES):
        raise SpecError(f"got model {model!r}; {EXPECTED}")
    folder = Path(model)
    if not folder.exists():
        check_name(model, engine_args)
        return
    if folder.is_dir() and (fault := fault_of(model, engine_args)) is not None:
        raise SpecError(fault)


def check_name(model: str, engine_args: Mapping[str, Any]) -> None:
    """Fetch the model's configuration. Raises SpecError: no such model, or it is gated;
    CommandError: no answer from the hub.
    """
    if (
        "://" in model
        or ":" in model
        or os.environ.get("VLLM_USE_MODELSCOPE")
        or any(key in engine_args for key in _OTHER_SOURCES)
    ):
        return
    if not _NAME.fullmatch(model):
        raise SpecError(f"got model {model!r}, which is not a directory here{_expected(model)}")
    if "/" not in model and (near := _near(model)):  # the Hub takes seconds to know no such name
        raise SpecError(f"got model {model!r}{near} {EXPECTED}")
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - half a second

    revision = engine_args.get("revision")
    if isinstance(
        try_to_load_from_cache(
            model, FILE, cache_dir=engine_args.get("download_dir"), revision=revision
        ),
        str,
    ):
        return
    if offline():
        raise SpecError(
            f"got model {model!r}, which is neither a directory here nor in the cache "
            f"(HF_HUB_OFFLINE is set){_expected(model)}"
        )
    _ask_hub(model, revision)


def _expected(model: str) -> str:
    """Behind what was got."""
    return f"{_near(model) or ';'} {EXPECTED}"


def _near(model: str) -> str:
    """The question whether a model that is made here was meant which has nearly that name; else
    an empty text.
    """
    name = model.rpartition("/")[2].lower()
    return suggest(
        next((made for made in MADE_HERE if name.startswith(f"{made}-")), name), MADE_HERE
    )


def offline() -> bool:
    """Whether the environment forbids to ask the hub."""
    return any(
        os.environ.get(name, "").lower() in {"1", "true", "yes", "on"}
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )


def _ask_hub(model: str, revision: str | None) -> None:
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url  # noqa: PLC0415

    try:
        get_hf_file_metadata(
            hf_hub_url(model, FILE, revision=revision)
        )  # asks once; hf_hub_download would try for 20 seconds
    except errors.EntryNotFoundError:
        return  # a model without config.json, such as Mistral's own format: vLLM decides
    except errors.GatedRepoError:
        raise SpecError(
            f"got model {model!r}, which is gated on the Hugging Face Hub; expected HF_TOKEN "
            "of an account with access"
        ) from None
    except errors.RepositoryNotFoundError:
        raise SpecError(
            f"got model {model!r}, which is neither a directory here nor on the Hugging Face "
            f"Hub{_expected(model)}"
        ) from None
    except errors.RevisionNotFoundError:
        raise SpecError(
            f"got revision {revision!r}, which model {model!r} does not have on the Hugging "
            "Face Hub"
        ) from None
    except (errors.HTTPError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CommandError(
            f"got model {model!r}, which is not a directory here, and the Hugging Face Hub "
            f"cannot be reached ({reason}){_expected(model)}"
        ) from None
