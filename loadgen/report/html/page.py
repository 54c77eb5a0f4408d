"""The page: sections in the order in which a reader asks, then everything inlined into one file
that asks nothing of a network.
"""

from __future__ import annotations

import re
from html import escape
from importlib import resources

import jinja2
import msgspec

from kendall.loadgen.report.html import text
from kendall.loadgen.report.html.data import ReportData, today
from kendall.loadgen.report.html.orders import order_table, ordered, orders_figure
from kendall.loadgen.report.html.over_load import over_load_figure
from kendall.loadgen.report.html.parts import parts_figure
from kendall.loadgen.report.html.tables import full_table, matrix, missing_table, senders
from kendall.loadgen.report.html.tails import tails_figure
from kendall.loadgen.report.html.versus import versus_figure
from kendall.loadgen.report.html.words import accuracy, causes, facts, headline, steady_state, title
from kendall.loadgen.report.numbers import typeset
from kendall.loadgen.report.report import client_lines, notes
from kendall.policies.text import counted

ROOT = resources.files("kendall.loadgen.report.html")
FIGURES = (versus_figure, orders_figure, over_load_figure, parts_figure, tails_figure)


def page(data: ReportData) -> str:
    """The whole HTML document."""
    cells = data.cells
    figures = [drawn for draw in FIGURES if (drawn := draw(cells))]
    drawn_names = {drawn["name"] for drawn in figures}
    return template("assets/page.html").render(
        data=data,
        texts=text,
        today=today(),
        title=title(data),
        headline=headline(cells),
        steady_state=steady_state(cells),
        accuracy=accuracy(cells),
        causes=causes(cells),
        invalid=sum(cell.invalid for cell in cells),
        no_lateness=all(cell.lateness is None for cell in cells),
        matrix=matrix(cells),
        orders=order_table(cells) if ordered(cells) else "",
        senders=senders(cells),
        table=full_table(cells),
        notes=[
            *notes([cell.comparison for cell in cells])[2:],
            *(line for cell in cells if cell.client for line in client_lines(cell.client)),
        ],
        missing=missing_table(data.missing),
        facts=facts(data),
        captions=[caption for caption in text.captions(cells) if caption[0] in drawn_names],
        css=asset("assets/page.css"),
        plotly=asset("vendor/plotly-basic.min.js"),
        script=asset("assets/page.js"),
        # JSON that cannot end the element it stands in
        figures=msgspec.json.encode(figures, enc_hook=float).decode().replace("<", "\\u003c"),
    )


def template(name: str) -> jinja2.Template:
    """A page, of which an indented line continues the one before it. What is shown is escaped where
    it is no HTML: `| text`, `| typeset`.
    """
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda part: re.sub(r"\n +", "", asset(part))),
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"text": escape, "typeset": typeset, "counted": counted}
    return environment.get_template(name)


def asset(name: str) -> str:
    """The text of a file that a page is made of."""
    return ROOT.joinpath(name).read_text(encoding="utf-8")
