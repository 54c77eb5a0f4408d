"""Policies from outside: modules and packages are found, and what is wrong with one is said."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kendall.policies import (
    POLICIES,
    Policy,
    SpecError,
    format_policy,
    parse_policy,
    policy_batch_size,
)
from kendall.policies.registry import (
    VARIABLE,
    class_fault,
    every_policy,
    is_built_in,
    is_first_come,
    may_preempt,
    policy_class,
    policy_names,
    use_modules,
)
from tests.policies.outside import SHORTEST, installed, module, nothing_known

CLASS = SHORTEST[SHORTEST.index("@dataclass") :]
HEAD = SHORTEST[: SHORTEST.index("@dataclass")]


@pytest.fixture(autouse=True)
def patch(tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    with nothing_known() as patch:
        patch.syspath_prepend(tmp_path)
        yield patch


def test_a_module_by_its_path(tmp_path: Path) -> None:
    use_modules([module(tmp_path, SHORTEST)])
    policy = parse_policy("shortest:max_batch_size=3")
    assert format_policy(policy) == "shortest:max_batch_size=3"
    assert format_policy(parse_policy("shortest:max_batch_size=8")) == "shortest"
    assert policy_batch_size(policy) == 3
    assert not is_built_in(policy)
    assert policy_names() == (*POLICIES, "shortest")


def test_a_module_by_its_name(tmp_path: Path) -> None:
    module(tmp_path, SHORTEST, "by_name_of_test.py")
    use_modules(["by_name_of_test"])
    assert parse_policy("shortest") == parse_policy("shortest:max_batch_size=8")


def test_a_relative_path_is_found_from_another_folder(
    tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    """As a child process may have another working directory."""
    module(tmp_path, SHORTEST)
    patch.chdir(tmp_path)
    for named in ("mine.py", "./mine.py"):
        use_modules([named])
        assert os.environ[VARIABLE] == str(tmp_path / "mine.py")
    with pytest.raises(SpecError, match=f"{tmp_path / 'mine'}, which cannot be imported"):
        use_modules(["./mine"])  # a path too


def test_a_child_process_knows_the_module(tmp_path: Path) -> None:
    use_modules([module(tmp_path, SHORTEST)])
    code = (
        "from kendall.policies import parse_policy; print(parse_policy('shortest').max_batch_size)"
    )
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    child = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.stdout.strip() == "8", child.stderr


def test_without_the_option_the_variable_counts(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setenv(VARIABLE, module(tmp_path, SHORTEST))
    use_modules(None)
    assert policy_class("shortest") is not None
    assert policy_class("nothing") is None


def test_a_package_is_found_by_its_entry_point(tmp_path: Path) -> None:
    module(tmp_path, SHORTEST, "packaged_of_test.py")
    installed(tmp_path, {"short-of-test": {"shortest": "packaged_of_test:Shortest"}})
    assert "packaged_of_test" not in sys.modules
    assert "shortest" in policy_names()
    assert parse_policy("capped:max_batch_size=4") is not None
    assert "packaged_of_test" not in sys.modules  # imported for its own policy only
    assert parse_policy("shortest").name == "shortest"
    (listed,) = [each for each in every_policy() if each.name == "shortest"]
    assert (listed.source, listed.fault) == ("short-of-test", None)
    assert listed.to_dict()["parameters"] == [
        {
            "name": "max_batch_size",
            "kind": "integer",
            "required": False,
            "default": 8,
            "size": True,
            "choices": [],
        }
    ]


def test_what_is_known_of_the_built_in_policies_is_not_of_those_from_outside(
    tmp_path: Path,
) -> None:
    use_modules([module(tmp_path, SHORTEST)])
    known = {
        text: (is_built_in(policy), may_preempt(policy), is_first_come(policy))
        for text in (
            "dynamic",
            "capped:max_batch_size=4,order=spjf",
            "single:order=sprpt",
            "shortest",
        )
        if (policy := parse_policy(text)) is not None
    }
    assert known == {
        "dynamic": (True, False, True),
        "capped:max_batch_size=4,order=spjf": (True, False, False),
        "single:order=sprpt": (True, True, False),
        "shortest": (False, True, False),
    }


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("raise RuntimeError('no')", "cannot be imported (RuntimeError: no)"),
        ("raise SystemExit(3)", "cannot be imported (SystemExit: 3)"),
        ("import nothing_of_that_name", "cannot be imported (ModuleNotFoundError"),
        ("x = 1", "cannot be imported (AttributeError"),
        ("Shortest = 5", "got 5; expected a dataclass with a method decide"),
        (SHORTEST.replace('"shortest"', '"longest"'), "a class with the name 'longest'; expected"),
        (SHORTEST.replace("frozen=True, ", ""), "which can be changed; expected @dataclass(frozen"),
        (SHORTEST.replace("def decide", "def choose"), "Shortest without decide; expected"),
        (SHORTEST.replace("(Policy)", ""), "without padded = True or False; expected it, or a"),
        (SHORTEST.replace("size: int", "size: list[int]"), "max_batch_size: list[int] of Shortest"),
        (SHORTEST.replace("size: int", "size: Missing"), "annotations cannot be read (name"),
    ],
)
def test_a_broken_package_is_told_to_those_who_use_it(tmp_path: Path, text: str, says: str) -> None:
    name = f"broken_{abs(hash(text))}"
    module(tmp_path, text, f"{name}.py")
    installed(tmp_path, {"short-of-test": {"shortest": f"{name}:Shortest"}})
    with pytest.raises(SpecError) as raised:
        parse_policy("shortest")
    assert says in str(raised.value)
    assert "package short-of-test" in str(raised.value)
    assert parse_policy("dynamic").name == "dynamic"
    with pytest.raises(SpecError, match="got policy 'nothing'; expected one of") as unknown:
        parse_policy("nothing")
    assert "shortest" not in str(unknown.value)
    (listed,) = [each for each in every_policy() if each.name == "shortest"]
    assert listed.cls is None
    assert says in str(listed.fault)
    assert listed.to_dict() == {
        "name": "shortest",
        "source": "short-of-test",
        "parameters": [],
        "orders": [],
        "fault": listed.fault,
    }


def test_a_package_with_the_name_of_a_built_in_policy_stops_nobody(tmp_path: Path) -> None:
    text = SHORTEST.replace('"shortest"', '"dynamic"')
    module(tmp_path, text, "named_dynamic_of_test.py")
    installed(tmp_path, {"short-of-test": {"dynamic": "named_dynamic_of_test:Shortest"}})
    assert is_built_in(parse_policy("dynamic"))
    faults = [each.fault for each in every_policy() if each.source == "short-of-test"]
    assert "which is the name of a built-in policy; expected another name" in str(faults[0])


def test_two_packages_with_one_name_are_told(tmp_path: Path) -> None:
    module(tmp_path, SHORTEST, "packaged_twice_of_test.py")
    point = {"shortest": "packaged_twice_of_test:Shortest"}
    installed(tmp_path, {"one-of-test": point, "two-of-test": point})
    with pytest.raises(SpecError, match=r"of the packages \S+-of-test and \S+-of-test; expected"):
        parse_policy("shortest")


def test_a_module_and_a_package_with_one_name_are_told(tmp_path: Path) -> None:
    path = module(tmp_path, SHORTEST, "both_of_test.py")
    installed(tmp_path, {"short-of-test": {"shortest": "both_of_test:Shortest"}})
    with pytest.raises(SpecError, match="and of another module or package; expected it once"):
        use_modules([path])
    assert VARIABLE not in os.environ


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "which has no policy; expected a frozen dataclass with a method decide"),
        (
            "1/0",
            "cannot be imported (ZeroDivisionError: division by zero); expected a module without",
        ),
        ("import nothing_of_test", "No module named 'nothing_of_test'); expected a module without"),
        (SHORTEST.replace('"shortest"', '"capped"'), "which is the name of a built-in policy"),
        (SHORTEST.replace('"shortest"', '"Shortest!"'), "with name='Shortest!'; expected a name"),
        (SHORTEST + CLASS.replace("class Shortest", "class Other"), "two classes with the name"),
        (
            HEAD + "from kendall.policies import Capped\n" + CLASS.replace("(Policy)", "(Capped)"),
            "a subclass of Capped; expected a class of its own",
        ),
        (
            SHORTEST.replace(
                "    max_batch",
                "    joins_running: ClassVar[bool] = True\n"
                "    padded: ClassVar[bool] = True\n    max_batch",
            ),
            'with joins_running; expected padded = False and release = "request"',
        ),
        (
            SHORTEST.replace(
                "    max_batch",
                "    joins_running: ClassVar[bool] = True\n"
                '    release: ClassVar[str] = "batch"\n    max_batch',
            ),
            'with joins_running; expected padded = False and release = "request"',
        ),
        (
            SHORTEST.replace(
                "    max_batch", '    release: ClassVar[str] = "later"\n    max_batch'
            ),
            "with release='later'; expected",
        ),
    ],
)
def test_what_is_wrong_with_a_module_is_said(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(SpecError) as raised:
        use_modules([module(tmp_path, text)])
    assert says in str(raised.value)
    assert parse_policy("single").name == "single"


@pytest.mark.parametrize("named", ["no_such_module_of_test", "/nowhere/policy.py"])
def test_a_module_that_is_not_there(named: str) -> None:
    with pytest.raises(SpecError, match=r"which cannot be imported \(.*\); expected the name of"):
        use_modules([named])


def test_a_module_by_its_name_that_lacks_another_is_there(tmp_path: Path) -> None:
    module(tmp_path, "import nothing_of_test", "lacking_of_test.py")
    module(tmp_path, "1/0", "failing_of_test.py")
    for named in ("lacking_of_test", "failing_of_test"):
        with pytest.raises(SpecError, match="expected a module without this error"):
            use_modules([named])


def test_a_broken_module_of_the_variable_is_listed_with_its_fault(
    tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    path = module(tmp_path, "1/0")
    patch.setenv(VARIABLE, path)
    (listed,) = [each for each in every_policy() if each.source == path]
    assert (listed.name, listed.cls) == (path, None)
    assert "cannot be imported (ZeroDivisionError" in str(listed.fault)


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(SpecError, match="got --policy-module ''; expected a module"):
        use_modules([""])


def test_a_path_with_a_space_is_refused(tmp_path: Path) -> None:
    (folder := tmp_path / "my policies").mkdir()
    with pytest.raises(SpecError, match="expected a path without spaces"):
        use_modules([module(folder, SHORTEST)])


def test_what_is_no_class_is_no_policy() -> None:
    class Plain(Policy):
        pass

    for wrong in (5, Plain, parse_policy("single")):
        assert "expected a dataclass with a method decide" in str(class_fault(wrong))
    assert class_fault(policy_class("capped")) is None


TYPES = SHORTEST.replace(
    "    max_batch_size: int = 8\n",
    """    weight: float
    count: int = -3
    fair: bool = True
    word: str = "a"
    limit: int | None = 5
    pause: float | None = None
""",
).replace("self.max_batch_size", "8")


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("given", "canonical"),
    [
        ("weight=1.5", "weight=1.5"),
        ("weight=500ms", "weight=0.5"),
        ("weight=-inf", "weight=-inf"),
        ("weight=2,count=-3", "weight=2"),
        ("weight=2,count=7", "weight=2,count=7"),
        ("weight=2,fair=false", "weight=2,fair=false"),
        ("weight=2,fair=true", "weight=2"),
        ("weight=2,word=b=c", "weight=2,word=b=c"),
        ("weight=2,limit=none", "weight=2,limit=none"),
        ("weight=2,limit=5,pause=none", "weight=2"),
        ("weight=2,pause=1e-3", "weight=2,pause=0.001"),
    ],
)
def test_parameters_of_every_type(tmp_path: Path, given: str, canonical: str) -> None:
    use_modules([module(tmp_path, TYPES)])
    policy = parse_policy(f"shortest:{given}")
    assert format_policy(policy) == f"shortest:{canonical}"
    assert parse_policy(format_policy(policy)) == policy


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("", "got 'shortest'; expected weight too, for example shortest:weight=8"),
        (
            ":weight=x",
            "got weight='x' for policy shortest; expected a number, or a duration with its unit, "
            "such as 300ms",
        ),
        (":weight=nan", "got weight='nan' for policy shortest; expected a number"),
        (":weight=1,count=x", "got count=x for policy shortest; expected a whole number"),
        (":weight=1,count=1.5", "got count=1.5 for policy shortest; expected a whole number"),
        (":weight=1,fair=yes", "got fair=yes for policy shortest; expected true or false"),
        (":weight=1,size=2", "got key 'size' for policy shortest; expected weight, count, fair,"),
        (":weight=none", "got weight='none' for policy shortest; expected a number"),
    ],
)
def test_parameters_that_do_not_fit(tmp_path: Path, given: str, says: str) -> None:
    use_modules([module(tmp_path, TYPES)])
    with pytest.raises(SpecError) as raised:
        parse_policy(f"shortest{given}")
    assert says in str(raised.value)


ENDS = "from -1,000,000,000,000,000 to 1,000,000,000,000,000"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("x", "a whole number"),  # no number is beyond a border
        ("1.5", "a whole number"),
        ("1000000000000001", f"a whole number {ENDS}"),
        ("-1000000000000001", f"a whole number {ENDS}"),
    ],
)
def test_whole_numbers_have_borders_which_they_may_reach(
    tmp_path: Path, given: str, expected: str
) -> None:
    use_modules([module(tmp_path, TYPES)])
    for border in (10**15, -(10**15)):
        policy: Any = parse_policy(f"shortest:weight=1,count={border}")
        assert policy.count == border
    with pytest.raises(SpecError) as raised:
        parse_policy(f"shortest:weight=1,count={given}")
    said = f"got count={given} for policy shortest; expected {expected}"
    assert said in str(raised.value)
    assert str(raised.value).partition("expected ")[2].startswith("a whole number from") == (
        expected != "a whole number"
    )


@pytest.mark.parametrize(
    ("raised", "says"),
    [
        ("ValueError('too small')", "too small"),
        ("ValueError('too\\n\\nsmall')", "too small"),
        ("ZeroDivisionError()", "ZeroDivisionError"),
    ],
)
def test_what_the_class_refuses_is_told(tmp_path: Path, raised: str, says: str) -> None:
    own = CLASS + f"\n    def __post_init__(self) -> None:\n        raise {raised}\n"
    use_modules([module(tmp_path, HEAD + own)])
    with pytest.raises(SpecError, match=f"got 'shortest', which policy shortest refuses: {says}$"):
        parse_policy("shortest")
