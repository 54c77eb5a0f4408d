"""The prose that a person reads is plain: pages, help, the live page's words, log messages.

A sentence has at most `LONGEST` words, and none of the turns in `TURNS`, each of which has a plain
word in its place. A piece of code is one word; numbers and symbols are none.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import kendall.cli

ROOT = Path(__file__).resolve().parent.parent
LONGEST = 45  # words of a sentence
WORDS_OF_THE_PAGE = ROOT / "server/page/static/words.js"
LOGGING = [
    path
    for folder in ("server", "loadgen", "queueing", "kendall")
    for path in (ROOT / folder).rglob("*.py")
]
PAGES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docker/*.md"), *ROOT.glob("docs/**/*.md")]
    # notices quote licences; the others are written by programs: papers/ (whose notes quote the
    # papers) and bench/gpu_law.py
    if path.name != "THIRD_PARTY_NOTICES.md" and path.parent.name not in ("reproduction", "gpu-law")
)


@dataclass(frozen=True)
class Turn:
    """A turn of phrase that has a plain word."""

    name: str
    pattern: str
    example: str  # a sentence that has it
    plain: str  # the same without it
    case: bool = False  # whether the pattern heeds capitals

    def found_in(self, sentence: str) -> bool:
        """Whether a sentence has it."""
        return bool(re.search(self.pattern, sentence, 0 if self.case else re.IGNORECASE))


TURNS = [
    Turn(
        "a question word as a subject",
        r"^(Who|What|Whoever|Whatever)\b(?!-if| to\b)(?!.*\?$)(?=.*[.;:]$)",
        "Who asks for much waits longer.",
        "Heavy flows wait longer.",
        case=True,
    ),
    Turn("whoever", r"\bwho(so)?ever\b", "It is shown to whoever sent it.", "The client sees it."),
    Turn("as ever", r"\bas ever\b", "It waits, as ever.", "It waits, as before."),
    Turn(
        "is let go",
        r"\b(is|are|was|were|be) let go\b|\blets? go of\b",
        "The call is let go.",
        "The call ends.",
    ),
    Turn(
        "asked for by nobody",
        r"\b(nobody|no one|everybody|somebody)\b",
        "A field that nobody asked for is dropped.",
        "An unknown field is dropped.",
    ),
    Turn(
        "is told",
        r"\b(is|are|was|were|be|been) (not )?told (?!apart)",
        "A slow server is told at once.",
        "A slow server is reported at once.",
    ),
    Turn(
        "goes on",
        r"\b(goes|go|went|going|gone) on\b(?! (top|the page))",
        "The answer goes on after the restart.",
        "The answer continues after the restart.",
    ),
    Turn(
        "stands",
        r"\b(stands|stood|standing) (still|beside|behind|before|there|at|in|twice|alone)\b"
        r"|\bstand (still|beside|behind|before|there|at|in|twice|alone)\b",
        "The forecast stands beside it.",
        "The forecast is shown beside it.",
    ),
    Turn(
        "lies",
        r"\b(lies|lay|lain) (?!between|within|in the (95|interval)|above|below)",
        "The fault lies with the engine.",
        "The engine is at fault.",
    ),
    Turn(
        "a fragment that begins with `of`",
        r"^Of (?!\d|the \d|course)",
        "Of calls of one sequence, the speed.",
        "For calls of one sequence, the speed is shown.",
        case=True,
    ),
    Turn(
        "an inverted sentence",
        r"(^|[.:;] )(compared|printed|meant|counted|shown|left out|not there) (is|are|was|were)\b",
        "Compared is the sojourn time.",
        "The sojourn time is compared.",
    ),
    Turn(
        "a private picture",
        r"\b(twins?|doors?|diseases?|accuses?|honestly|the very|heeds?|luck|wander(s|ing)?)\b",
        "It says honestly that the mean is uncertain.",
        "It says that the mean is uncertain.",
    ),
    Turn(
        "says it of",
        r"\b(says?|said|knows?|tells?) (it |so )?of (its|their|the|a|an|each|all)\b",
        "The gateway says it of its own requests.",
        "The gateway reports it for its own requests.",
    ),
]


def sentences(text: str) -> Iterator[str]:
    """The sentences of one paragraph, item or cell: code is `x`, a link its text."""
    text = re.sub(r"(`+).*?\1", "`x`", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"\\?[*_]{1,2}(?=\S)|(?<=\S)[*_]{1,2}", "", text)
    end = re.compile(r"(?<=[.!?])(?<!\bal\.)(?<!\bEq\.)(?<!\be\.g\.)(?<!\.\.\.)[)\"]?\s+")
    yield from filter(None, end.split(" ".join(text.split())))


def paragraphs(page: str) -> Iterator[str]:
    """The paragraphs, items and cells of a page in Markdown, without its code."""
    page = re.sub(r"(?ms)^```.*?^```$", "\n\n", page)
    page = re.sub(r"(?s)<!--.*?-->", "", page)
    block: list[str] = []
    for line in [*page.splitlines(), ""]:
        text = line.strip()
        cells = text.startswith("|")
        item = re.match(r"([-*]|\d+\.) ", text)
        ends = not text or text.startswith("#") or line.startswith("    ") or cells or item
        if ends and block:
            yield " ".join(block)
            block = []
        if cells:
            yield from (cell.strip() for cell in re.split(r"(?<!\\)\|", text))
        elif text and not text.startswith("#") and not line.startswith("    "):
            block.append(text[item.end() :] if item else text)


def faults(text: str) -> list[str]:
    """What is not plain in a paragraph."""
    found = []
    for sentence in sentences(text):
        words = [word for word in sentence.split() if re.search(r"[^\W\d_]{2}|`", word)]
        if len(words) > LONGEST:
            found.append(f"{len(words)} words: {sentence}")
        found += [f"{turn.name}: {sentence}" for turn in TURNS if turn.found_in(sentence)]
    return found


def help_texts() -> Iterator[tuple[str, str]]:
    """Command and text of everything that `--help` prints."""
    for name, (_, about) in kendall.cli.COMMANDS.items():
        command = kendall.cli.command_of(name)
        yield name, about
        for part in (command.help or "").split("\n\n"):
            yield name, part
        for parameter in command.params:
            yield f"{name} {parameter.opts[0]}", parameter.help or ""


def page_words(source: str) -> list[str]:
    """The texts of a module of the live page: a template's values are left out."""
    code = re.sub(r"(?m)^\s*(//|/\*\*|\*).*$", "", source)
    texts = re.findall(r'"([^"\n]*)"|`([^`]*)`', code)
    return [re.sub(r"\$\{[^}]*\}", "x", "".join(pair)) for pair in texts]


def log_messages(source: str) -> Iterator[str]:
    """The first argument of every call of a logger, if it is a text."""
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
            continue
        logger, first = node.func.value, node.args[0]
        if not (isinstance(logger, ast.Name) and re.fullmatch(r"_?log(ger)?", logger.id)):
            continue
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            yield first.value
        elif isinstance(first, ast.JoinedStr):
            parts = (each.value if isinstance(each, ast.Constant) else "x" for each in first.values)
            yield "".join(map(str, parts))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_sentence_of_a_page_is_plain(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert [fault for part in paragraphs(text) for fault in faults(part)] == []


def test_every_sentence_of_the_help_is_plain() -> None:
    texts = list(help_texts())
    assert len(texts) > 300
    assert [f"{name}: {fault}" for name, text in texts for fault in faults(text)] == []


def test_the_words_of_the_page_are_plain() -> None:
    texts = page_words(WORDS_OF_THE_PAGE.read_text(encoding="utf-8"))
    assert "the gateway refuses a part of the calls" in texts
    assert [fault for text in texts for fault in faults(text)] == []


def test_log_messages_are_plain() -> None:
    texts = [text for path in LOGGING for text in log_messages(path.read_text(encoding="utf-8"))]
    assert len(texts) > 80
    assert [fault for text in texts for fault in faults(text)] == []


@pytest.mark.parametrize("turn", TURNS, ids=lambda turn: turn.name)
def test_each_turn_is_found_and_its_plain_form_is_not(turn: Turn) -> None:
    assert faults(turn.example) == [f"{turn.name}: {turn.example}"]
    assert faults(turn.plain) == []


def test_a_long_sentence_is_found() -> None:
    assert faults(" ".join(["word"] * LONGEST) + ".") == []
    (fault,) = faults(" ".join(["word"] * (LONGEST + 1)) + ".")
    assert fault.startswith("46 words: ")


@pytest.mark.parametrize(
    ("read", "source"),
    [
        (lambda text: list(paragraphs(text)), "# Title\n\n- An item that\n  goes on.\n"),
        (lambda text: list(paragraphs(text)), "| a | The answer\\|goes on. |\n"),
        (page_words, 'const A = ["It goes on"];\n// it goes on\n'),
        (lambda text: list(log_messages(text)), 'log.info("it goes on: %s", 1)\n'),
        (lambda text: list(log_messages(text)), 'log.error(f"{name} goes on")\n'),
    ],
)
def test_a_fault_is_found_wherever_prose_is_read(
    read: Callable[[str], list[str]], source: str
) -> None:
    assert len([fault for text in read(source) for fault in faults(text)]) == 1


def test_code_is_no_prose() -> None:
    page = "```sh\nkendall serve tiny   # it goes on\n```\n\n    it goes on\n\n`goes on`\n"
    assert [fault for part in paragraphs(page) for fault in faults(part)] == []
