"""Panels of one look: each has a unit, thresholds and a sentence that says what it shows; nothing
is left to a default of Grafana's.

Thresholds carry colour only where a level is good or bad in itself. A delay has no such level
(whose patience?), except the limits of a person's attention: 1 s keeps a train of thought, 10 s
loses it (Nielsen, Usability Engineering, 1993, ch. 5).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from grafana_foundation_sdk.builders import (
    bargauge,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.builders import common as build
from grafana_foundation_sdk.builders.dashboard import ThresholdsConfig
from grafana_foundation_sdk.models import common, units
from grafana_foundation_sdk.models.dashboard import (
    DataTransformerConfig,
    DynamicConfigValue,
    GridPos,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMappingResult,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat, QueryEditorMode

SOURCE = common.DataSourceRef(
    type_val="prometheus", uid="${datasource}"
)  # the variable of grafana.frame: chosen above the dashboard
SECONDS, PER_SECOND, FRACTION, COUNT, STATE = (
    units.Seconds,
    units.RequestsPerSecond,
    units.PercentUnit,
    units.Short,
    units.NoUnit,
)
TOKENS_PER_SECOND, BYTES = "suffix: tok/s", units.BytesIEC
Limits = Sequence[tuple[float, str]]
P = TypeVar(
    "P",
    timeseries.Panel,
    stat.Panel,
    statetimeline.Panel,
    heatmap.Panel,
    bargauge.Panel,
    table.Panel,
)
ATTENTION: Limits = ((1.0, "orange"), (10.0, "red"))
LOAD: Limits = ((0.8, "orange"), (0.9, "red"))
HOLDS = {"0": ("fails", "red"), "1": ("holds", "green")}


@dataclass(frozen=True)
class Series:
    """One query: an expression and what its lines are called."""

    expr: str
    legend: str


def lines(
    title: str,
    says: str,
    unit: str,
    series: Sequence[Series],
    *,
    limits: Limits = (),
    width: int = 12,
    stacked: bool = False,
) -> timeseries.Panel:
    """Values over time."""
    shown = (
        common.GraphThresholdsStyleMode.DASHED
        if limits and limits is not ATTENTION
        else common.GraphThresholdsStyleMode.OFF
    )
    panel = _filled(
        timeseries.Panel(), title, says, unit, series, limits=limits, width=width, height=8
    )
    panel.legend(
        build.VizLegendOptions()
        .display_mode(common.LegendDisplayMode.TABLE)
        .show_legend(True)
        .calcs(["mean", "lastNotNull"])
    )
    panel.tooltip(
        build.VizTooltipOptions()
        .mode(common.TooltipDisplayMode.MULTI)
        .sort(common.SortOrder.DESCENDING)
    )
    panel.thresholds_style(build.GraphThresholdsStyleConfig().mode(shown))
    panel.line_width(2 if not stacked else 1).fill_opacity(0 if not stacked else 40).show_points(
        common.VisibilityMode.NEVER
    )
    panel.span_nulls(False)
    if stacked:
        panel.stacking(build.StackingConfig().mode(common.StackingMode.NORMAL))
    return panel


def dashed(panel: timeseries.Panel, pattern: str) -> timeseries.Panel:
    """What theory says is dashed, what was seen is solid."""
    return panel.override_by_regexp(
        pattern,
        [DynamicConfigValue(id_val="custom.lineStyle", value={"fill": "dash", "dash": [8, 6]})],
    )


def number(
    title: str,
    says: str,
    unit: str,
    series: Series,
    *,
    limits: Limits = (),
    width: int = 4,
    names: Mapping[str, tuple[str, str]] | None = None,
    empty: str | None = None,
) -> stat.Panel:
    """The value now, large, and its course behind it. Without a unit of its own (an info metric)
    its name is shown instead. `empty`: what is shown in the place of a value that may be missing,
    which is then no good or bad sign.

    A state, and a value that may be missing, is asked for at the end of the time range alone: over
    the range, a policy that was switched off would still be shown beside the one in force.
    """
    instant = unit == STATE or empty is not None
    panel = _filled(
        stat.Panel(),
        title,
        says,
        unit,
        [] if instant else [series],
        limits=limits,
        width=width,
        height=4,
        base="green" if empty is None else "text",
    )
    if empty is not None:
        panel.no_value(empty)
    if instant:
        panel.with_target(_query(series, _reference(0)).instant())
    panel.reduce_options(build.ReduceDataOptions().calcs(["lastNotNull"]))
    panel.graph_mode(common.BigValueGraphMode.NONE if instant else common.BigValueGraphMode.AREA)
    if unit != STATE:
        mode = common.BigValueTextMode.VALUE_AND_NAME if instant else common.BigValueTextMode.AUTO
    else:
        mode = common.BigValueTextMode.AUTO if names else common.BigValueTextMode.NAME
    panel.text_mode(mode)
    panel.color_mode(common.BigValueColorMode.VALUE)
    return panel.mappings([_named(names)]) if names else panel


def states(
    title: str,
    says: str,
    series: Sequence[Series],
    names: Mapping[str, tuple[str, str]],
    *,
    width: int = 12,
) -> statetimeline.Panel:
    """One lane a series: which state when. `names`: value to word and colour."""
    panel = _filled(
        statetimeline.Panel(),
        title,
        says,
        STATE,
        series,
        limits=[(1.0, "green")],
        width=width,
        height=8,
        base="red",
    )
    panel.mappings([_named(names)]).merge_values(True).show_value(
        common.VisibilityMode.NEVER
    ).row_height(0.8).fill_opacity(80)
    return panel.legend(
        build.VizLegendOptions().display_mode(common.LegendDisplayMode.LIST).show_legend(True)
    )


def density(title: str, says: str, buckets: str, *, width: int = 12) -> heatmap.Panel:
    """A distribution over time: how often (colour) which value (height), from a histogram's
    buckets.
    """
    panel = _filled(heatmap.Panel(), title, says, PER_SECOND, [], limits=(), width=width, height=10)
    panel.with_target(
        _query(Series(buckets, "{{le}}"), "A").format(PromQueryFormat.HEATMAP).range()
    )
    panel.calculate(False).y_axis(heatmap.YAxisConfig().unit(SECONDS)).show_legend()
    return panel.color(
        heatmap.HeatmapColorOptions()
        .mode(HeatmapColorMode.SCHEME)
        .scheme("Viridis")
        .steps(64)
        .exponent(0.5)
    )


def bars(
    title: str,
    says: str,
    unit: str,
    series: Sequence[Series],
    *,
    limits: Limits = (),
    width: int = 12,
) -> bargauge.Panel:
    """Values at the end of what is shown, one bar each, to compare."""
    panel = _filled(bargauge.Panel(), title, says, unit, [], limits=limits, width=width, height=8)
    for index, each in enumerate(series):
        panel.with_target(_query(each, _reference(index)).instant())
    panel.reduce_options(build.ReduceDataOptions().calcs(["lastNotNull"])).orientation(
        common.VizOrientation.HORIZONTAL
    )
    return panel.display_mode(common.BarGaugeDisplayMode.BASIC).show_unfilled(True)


@dataclass(frozen=True)
class Column:
    """One column of a table; every column's expression has the same labels."""

    name: str
    expr: str
    unit: str
    limits: Limits = ()


def grid(
    title: str,
    says: str,
    columns: Sequence[Column],
    *,
    key: str,
    ascending: bool = False,
    width: int = 24,
    height: int = 9,
) -> table.Panel:
    """One row for each value of the label `key`, by the first column."""
    panel = _filled(
        table.Panel(), title, says, columns[0].unit, [], limits=(), width=width, height=height
    )
    for index, column in enumerate(columns):
        panel.with_target(
            _query(Series(column.expr, ""), _reference(index))
            .format(PromQueryFormat.TABLE)
            .instant()
        )
        properties = [DynamicConfigValue(id_val="unit", value=column.unit)]
        if column.limits:
            properties.append(
                DynamicConfigValue(id_val="thresholds", value=_thresholds(column.limits).build())
            )
            properties.append(
                DynamicConfigValue(id_val="custom.cellOptions", value={"type": "color-text"})
            )
        panel.override_by_name(column.name, properties)
    named = {f"Value #{_reference(index)}": column.name for index, column in enumerate(columns)}
    panel.with_transformation(DataTransformerConfig(id_val="merge", options={}))
    order = {name: index for index, name in enumerate([key, *named])}
    options: dict[str, Any] = {
        "excludeByName": {"Time": True},
        "renameByName": named,
        "indexByName": order,
    }
    panel.with_transformation(DataTransformerConfig(id_val="organize", options=options))
    return panel.sort_by(
        [build.TableSortByFieldState().display_name(columns[0].name).desc(not ascending)]
    )


def _filled(
    panel: P,
    title: str,
    says: str,
    unit: str,
    series: Sequence[Series],
    *,
    limits: Limits,
    width: int,
    height: int,
    base: str = "green",
) -> P:
    panel.title(title).description(says).datasource(SOURCE).unit(unit).grid_pos(
        GridPos(h=height, w=width)
    )
    panel.thresholds(_thresholds(limits, base))
    for index, each in enumerate(series):
        panel.with_target(_query(each, _reference(index)).range())
    return panel


def _query(series: Series, reference: str) -> prometheus.Dataquery:
    query = prometheus.Dataquery().expr(series.expr).legend_format(series.legend).ref_id(reference)
    return query.datasource(SOURCE).editor_mode(QueryEditorMode.CODE)


def _thresholds(limits: Limits, base: str = "green") -> ThresholdsConfig:
    steps = [
        Threshold(value=None, color=base),
        *(Threshold(value=value, color=colour) for value, colour in limits),
    ]
    return ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


def _named(names: Mapping[str, tuple[str, str]]) -> ValueMap:
    words = {
        value: ValueMappingResult(text=word, color=colour, index=index)
        for index, (value, (word, colour)) in enumerate(names.items())
    }
    return ValueMap(options=words)


def _reference(index: int) -> str:
    return chr(ord("A") + index)
