"""Which artefacts there are, and where they are made; nothing is imported before it is asked
for.
"""

from __future__ import annotations

from importlib import import_module

from kendall.policies.text import SpecError, suggest
from papers.reproduction.artefact import Artefact, Say

CATALOGUE: dict[str, tuple[str, str]] = {
    "yang-table1": ("yang.single", "table1"),
    "yang-fig3": ("yang.batches", "fig3"),
    "yang-fig4": ("yang.clipping", "fig4"),
    "yang-fig5": ("yang.batches", "fig5"),
    "yang-fig6": ("yang.policies", "fig6"),
    "inoue-table1": ("inoue", "table1"),
    **{
        f"inoue-fig{number}": ("inoue" if number < 4 else "inoue_queue", f"fig{number}")
        for number in range(2, 9)
    },
    "chapter-latency": ("chapter", "latency"),
    "chapter-variability": ("chapter", "variability"),
    "chapter-batching": ("chapter", "batching"),
    "chapter-case": ("chapter", "case_study"),
    "slides-example": ("slides.words", "example"),
    "slides-sprpt": ("slides.tables", "shortest_remaining"),
    "slides-spjf": ("slides.tables", "shortest_first"),
    "slides-table1": ("slides.thresholds", "table1"),
    "slides-table2": ("slides.thresholds", "table2"),
    "slides-misprediction": ("slides.errors", "misprediction"),
    "slides-noise": ("slides.errors", "noise"),
    "slides-choices": ("slides.errors", "choices"),
    "slides-costs": ("slides.costs", "costs"),
    "slides-kv": ("slides.words", "kv_cache"),
    "slides-memory": ("slides.serving", "memory"),
    "slides-calls": ("slides.serving", "calls"),
    "slides-phases": ("slides.machines", "phases"),
    "slides-models": ("slides.machines", "models"),
}
GROUPS = ("all", "yang", "inoue", "chapter", "slides")


def chosen(words: list[str]) -> list[str]:
    """The artefacts that the words name, in the catalogue's order. Raises SpecError."""
    known = (*GROUPS, *CATALOGUE)
    for word in words:
        if word not in known:
            raise SpecError(
                f"got {word!r}; expected {', '.join(GROUPS)} or one of "
                f"{', '.join(CATALOGUE)}{suggest(word, known)}"
            )
    return [
        name
        for name in CATALOGUE
        if "all" in words or name in words or name.partition("-")[0] in words
    ]


def make(name: str, say: Say) -> Artefact:
    """Compute one; `say` is told what is being done."""
    module, function = CATALOGUE[name]
    artefact: Artefact = getattr(import_module(f"papers.reproduction.{module}"), function)(say)
    return artefact
