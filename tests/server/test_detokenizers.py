"""Token ids become text: by the tokenizers library where the tokenizer has it, else step by step;
both stand behind the last tokens of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from tokenizers.decoders import ByteLevel, Metaspace

from kendall.policies import Request
from kendall.server.engines.base import EngineRequest, Sampling
from kendall.server.engines.vllm.reader import (
    FastDetokenizer,
    SlowDetokenizer,
    detokenizer,
)

LETTERS = "abcdefghij"


class Spelled:
    """A tokenizer of letters, which keeps what it is asked to decode."""

    def __init__(self, backend: Any) -> None:
        self.backend_tokenizer = backend
        self.asked: list[int] = []

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        del skip_special_tokens
        self.asked.append(len(ids))
        return "".join(LETTERS[each] for each in ids)


def backend() -> Tokenizer:
    made = Tokenizer(models.BPE(vocab={each: n for n, each in enumerate(LETTERS)}, merges=[]))
    made.decoder = ByteLevel()
    return made


def request(prompt: Sequence[int], made: Sequence[int] = ()) -> EngineRequest:
    asked = Request("a", 0.0, len(prompt), 9)
    return EngineRequest(asked, prompt, Sampling(max_tokens=9), output_token_ids=made)


@pytest.mark.parametrize(("fast", "kind"), [(True, FastDetokenizer), (False, SlowDetokenizer)])
def test_the_library_is_used_where_the_tokenizer_has_it(fast: bool, kind: type) -> None:
    found = detokenizer(Spelled(backend() if fast else None), request([1, 2], [3]))
    assert isinstance(found, kind)
    assert [found.piece(each) for each in (4, 5)] == ["e", "f"]


def test_of_a_long_prompt_only_its_end_is_decoded() -> None:
    tokenizer = Spelled(None)
    found = detokenizer(tokenizer, request([3] * 500))
    assert found.piece(4) == "e"
    assert max(tokenizer.asked) == 16 + 1


def test_the_first_word_keeps_its_space_behind_a_short_prompt() -> None:
    """The library's own stream drops it at the begin of a text."""
    made = Tokenizer(models.WordLevel({"\u2581hello": 0, "\u2581there": 1}, unk_token=""))
    made.decoder = Metaspace()
    found = detokenizer(SimpleNamespace(backend_tokenizer=made), request([0]))
    assert found.piece(1) == " there"
