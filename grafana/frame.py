"""What every dashboard has around its panels: variables, the marks of policy switches, links to
the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grafana_foundation_sdk.builders.dashboard import (
    AnnotationQuery,
    Dashboard,
    DashboardLink,
    DatasourceVariable,
    QueryVariable,
    Row,
)
from grafana_foundation_sdk.models.dashboard import Dashboard as Model
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

from grafana.panels import SOURCE
from grafana.queries import CHOSEN

TAG = "kendall"
EPOCH = f"kendall_policy_info{{{CHOSEN}}} unless kendall_policy_info{{{CHOSEN}}} offset 1m"
Section = tuple[str, Sequence[Any]]  # a row's title and its panels


def dashboard(uid: str, title: str, says: str, sections: Sequence[Section]) -> Model:
    """The whole dashboard, panels numbered in their order."""
    frame = (
        Dashboard(title)
        .uid(uid)
        .description(says)
        .tags([TAG])
        .time("now-15m", "now")
        .refresh("5s")
        .timezone("browser")
    )
    frame.tooltip(DashboardCursorSync.CROSSHAIR).editable().version(1)
    frame.variables([_datasource(), _model(), _instance(), _policy()]).annotation(_epochs())
    frame.link(
        DashboardLink("Kendall")
        .type(DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .keep_time(True)
        .include_vars(True)
    )
    for name, panels in sections:
        frame.with_row(Row(name))
        for panel in panels:
            frame.with_panel(panel)
    built = frame.build()
    for number, panel in enumerate(built.panels or [], start=1):
        panel.id_val = number
    return built


def _datasource() -> DatasourceVariable:
    """Which Prometheus: with nothing chosen, Grafana takes its default one."""
    return DatasourceVariable("datasource").label("Data source").type("prometheus")


def _model() -> QueryVariable:
    return _variable("model", "Model", "label_values(kendall_engine_info, model)")


def _instance() -> QueryVariable:
    """Of the chosen models: without a value of its own for "all", that is all of those, not all
    there are.
    """
    return _variable(
        "instance", "Gateway", 'label_values(kendall_engine_info{model=~"$model"}, instance)'
    )


def _policy() -> QueryVariable:
    """ "All" is `.*`: a policy that comes into force while the dashboard is open is shown at
    once.
    """
    return _variable(
        "policy", "Policy", f"label_values(kendall_requests_total{{{CHOSEN}}}, policy)"
    ).all_value(".*")


def _variable(name: str, label: str, query: str) -> QueryVariable:
    variable = (
        QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query({"query": query, "refId": name})
        .definition(query)
    )
    variable.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED).sort(
        VariableSort.ALPHABETICAL_ASC
    ).multi(True).include_all(True)
    return variable.current(VariableOption(text="All", value="$__all"))


def _epochs() -> AnnotationQuery:
    """The first minute of each epoch, shaded: statistics begin anew, and the queue has not
    settled yet.
    """
    marks = (
        AnnotationQuery()
        .name("Policy switches")
        .datasource(SOURCE)
        .enable(True)
        .hide(False)
        .icon_color("purple")
        .expr(EPOCH)
    )
    marks.title_format("{{policy}}").text_format(
        "epoch {{epoch}}, max_output_tokens {{max_output_tokens}}"
    ).step("5s")
    return marks
