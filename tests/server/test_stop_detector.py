"""Where an answer ends, token by token."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kendall.server.engines.base import Sampling, Token
from kendall.server.queue.stop_detector import StopDetector

EOS = frozenset({0})


def fed(pieces: list[str], **sampling: object) -> tuple[str, StopDetector]:
    detector = StopDetector(Sampling(**({"max_tokens": 100} | sampling)), EOS)
    text = ""
    for piece in pieces:
        text += detector.feed(
            Token(0 if piece == "<eos>" else 5, "" if piece == "<eos>" else piece)
        )
        if detector.finish_reason:
            break
    return text, detector


def test_the_limit_ends_with_length_and_shows_all_text() -> None:
    text, detector = fed(["a", "b", "c", "d"], max_tokens=3)
    assert (text, detector.finish_reason, detector.output_tokens) == ("abc", "length", 3)


def test_end_of_sequence_counts_and_shows_nothing() -> None:
    text, detector = fed(["a", "<eos>", "c"])
    assert (text, detector.finish_reason, detector.output_tokens) == ("a", "stop", 2)


def test_min_tokens_holds_off_end_of_sequence_and_stop_strings() -> None:
    text, detector = fed(["a", "<eos>", "a", "b", "<eos>"], min_tokens=4)
    assert (text, detector.output_tokens) == ("aab", 5)
    assert fed(["x", "x", "x"], min_tokens=2, stop=("x",))[1].output_tokens == 2


def test_a_stop_string_before_min_tokens_is_shown_at_once_and_ends_nothing_later() -> None:
    text, detector = fed(["x", "y", "x"], min_tokens=2, stop=("x",))
    assert (text, detector.finish_reason, detector.output_tokens) == ("xy", "stop", 3)


def test_a_stop_token_ends_from_the_last_of_min_tokens_on() -> None:
    for made, ends in ((2, False), (3, True)):
        detector = StopDetector(Sampling(max_tokens=100, min_tokens=3, stop_token_ids=(7,)), EOS)
        for _ in range(made):
            assert detector.finish_reason is None
            detector.feed(Token(7, "a"))
        assert (detector.finish_reason == "stop", detector.stop_reason) == (
            ends,
            7 if ends else None,
        )


def test_ignore_eos_goes_on() -> None:
    assert fed(["a", "<eos>", "c"], ignore_eos=True, max_tokens=3)[0] == "ac"


def test_a_stop_string_over_several_tokens_is_held_back_and_cut() -> None:
    text, detector = fed(["one ", "tw", "o", " three"], stop=("two",))
    assert (text, detector.finish_reason, detector.stop_reason) == ("one ", "stop", "two")
    assert fed(["one ", "tw", "o"], stop=("two",), include_stop_str_in_output=True)[0] == "one two"


def test_what_only_began_like_a_stop_string_is_shown_after_all() -> None:
    assert fed(["one ", "tw", "ist", "!"], stop=("two",))[0] == "one twist!"
    assert fed(["one ", "tw"], stop=("two",), max_tokens=2)[0] == "one tw"


def test_the_earliest_stop_string_wins() -> None:
    text, detector = fed(["abc def"], stop=("def", "bc"))
    assert (text, detector.stop_reason) == ("a", "bc")


@given(
    st.lists(st.text(alphabet="ab", min_size=0, max_size=3), max_size=12),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=3), max_size=3),
)
def test_the_shown_text_is_the_text_before_the_first_stop_string(
    pieces: list[str], stops: list[str]
) -> None:
    """However the text is cut into tokens."""
    text, detector = fed([*pieces, "z"], stop=tuple(stops), max_tokens=len(pieces) + 1)
    whole, upto = "".join(pieces), ""
    for piece in [*pieces, "z"]:  # the first token at whose end a stop string is in the text
        upto += piece
        if any(stop in upto for stop in stops):
            at = min(upto.find(stop) for stop in stops if stop in upto)
            assert (text, detector.finish_reason) == (upto[:at], "stop")
            return
    assert (text, detector.finish_reason) == (whole + "z", "length")
