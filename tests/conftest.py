"""Settings for every test: Hypothesis profiles, and the marker of tests on the real engine."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, Phase, is_hypothesis_test, settings

from kendall.queueing.commands import terminal
from tests.support import require_vllm

# seconds: what a command prints in a test does not tell how long it took; a test of that sets it
terminal.SILENT = 1e6

for _name in (
    "COLUMNS",
    "LINES",
    "FORCE_COLOR",
    "NO_COLOR",
    "PY_COLORS",
    "CLICOLOR_FORCE",
    "GITHUB_ACTIONS",
):
    os.environ.pop(_name, None)  # they change what commands print; a test that needs one sets it
PATIENT = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)  # a busy machine is no error
settings.register_profile("same", PATIENT, derandomize=True)
settings.register_profile("fuzz", PATIENT)  # `make fuzz`
settings.register_profile(  # `make mutants`: a failure is enough, however large its example
    "unshrunk", PATIENT, derandomize=True, phases=[Phase.explicit, Phase.generate]
)
settings.load_profile("same")
Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)
LONGEST_FILE = "test_printed_commands.py"
LONGEST_ID = 1000
MORE = 20  # times as many examples under "fuzz"


def pytest_itemcollected(item: pytest.Item) -> None:
    """Every k-th case of a test marked `thinned(k)` runs in `make test`, all in `make test-all`."""
    thinned = item.get_closest_marker("thinned")
    if thinned is not None and sum(item.callspec.indices.values()) % thinned.args[0]:  # type: ignore[attr-defined]
        item.add_marker("left_out")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In random order, but folder after folder: what a folder shares is started once; first the
    file that is as long as all the others of its part on another processor.

    `make fuzz`: the property tests only, with `MORE` times the examples that each asks for.
    """
    folders = {
        folder: place
        for place, folder in enumerate(dict.fromkeys(item.path.parent for item in items))
    }
    items.sort(key=lambda item: (item.path.name != LONGEST_FILE, folders[item.path.parent]))
    for item in items:
        if len(item.nodeid) > LONGEST_ID:
            raise pytest.UsageError(
                f"got a test's id of {len(item.nodeid):,} characters, {item.nodeid[:120]}...; "
                f"expected at most {LONGEST_ID}: pytest puts it into the environment, and no "
                "process can be started with a long one"
            )
    if config.getoption("--hypothesis-profile") != "fuzz":
        return
    properties = [item for item in items if is_hypothesis_test(getattr(item, "obj", None))]
    for function in {getattr(item.obj, "__func__", item.obj) for item in properties}:  # type: ignore[attr-defined]
        # there is no public way to a decorated test's settings
        asked = function._hypothesis_internal_use_settings
        function._hypothesis_internal_use_settings = settings(
            asked, max_examples=MORE * asked.max_examples
        )
    config.hook.pytest_deselected(items=[item for item in items if item not in properties])
    items[:] = properties


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Continuous integration has every part: there a skipped test is a failure, elsewhere it is
    visible.
    """
    return unless_on_ci((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same for a whole file."""
    return unless_on_ci((yield))


def unless_on_ci(report: Report) -> Report:
    """A skip, or the failure that it is under CI=true."""
    if report.skipped and os.environ.get("CI") == "true" and not hasattr(report, "wasxfail"):
        report.outcome, report.longrepr = "failed", f"skipped under CI=true: {report.longrepr}"
    return report


@pytest.fixture(autouse=True, scope="module")
def _environment() -> Iterator[None]:
    """What a module sets ends with it: vLLM, started in this process, sets a dozen variables."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _engine_is_there(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("engine"):
        require_vllm()
