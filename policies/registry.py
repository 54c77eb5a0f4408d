"""Every policy that a text can name: the built-in ones, those of the user's modules, and those of
installed packages.

`--policy-module my_module` or `--policy-module path/to/file.py` names a module with policy classes.
It is kept in the environment, in KENDALL_POLICY_MODULE (several are separated by spaces), so that
the processes that this one starts know it too. A package declares `name = "package:Class"` in the
entry-point group `kendall.policies`. It is imported when a text names its policy, or when all
policies are listed: a broken package stops nobody who does not use its policy.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from kendall.policies.core import Policy
from kendall.policies.errors import SpecError
from kendall.policies.fixed import Fixed
from kendall.policies.immediate import Capped, Continuous, Dynamic, Elastic, Single
from kendall.policies.ordered import Ordered, order_of
from kendall.policies.orders import FIRST_COME, ORDERS
from kendall.policies.parameters import parameters_of
from kendall.policies.unpadded import UnpaddedFixed

POLICIES: dict[str, type[Policy]] = {
    "single": Single,
    "dynamic": Dynamic,
    "fixed": Fixed,
    "capped": Capped,
    "elastic": Elastic,
    "continuous": Continuous,
}  # built in
_BUILT_IN = frozenset((*POLICIES.values(), UnpaddedFixed))  # asked with every decision
GROUP = "kendall.policies"
VARIABLE = "KENDALL_POLICY_MODULE"
BUILT_IN = "built in"
_NAME = re.compile(r"[a-z][a-z0-9_-]*")
_SWITCHES = ("padded", "wants_steps", "joins_running")
_RELEASES = ("batch", "request")
_modules: dict[str, dict[str, type[Policy]]] = {}  # policies by name, by module


@dataclasses.dataclass(frozen=True, slots=True)
class Listed:
    """A policy that a text can name; `fault`: why it cannot be used, and then no class."""

    name: str
    source: str  # built in, a module, or a package
    cls: type[Policy] | None
    fault: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """With its parameters and the orders that it serves, for the page and `kendall check-policy
        --json`.
        """
        return {
            "name": self.name,
            "source": self.source,
            "parameters": [] if self.cls is None else _described(self.cls),
            "orders": [] if self.cls is None else _orders(self.cls),
            "fault": self.fault,
        }


def _described(cls: type) -> list[dict[str, Any]]:
    return [parameter.to_dict() for parameter in parameters_of(cls).values()]


def _orders(policy: type[Policy]) -> list[dict[str, Any]]:
    """The orders that a policy serves, each with its own parameters."""
    if not issubclass(policy, Ordered):
        return []
    (bound,) = (each for each in _described(policy) if each["name"] == "max_preemptions")
    return [
        {
            "name": order.name,
            "predicts": order.predicts,
            "preemptive": order.preemptive,
            "parameters": [*_described(order), *([bound] if order.preemptive else [])],
        }
        for order in ORDERS.values()
        if policy.serves(order)
    ]


def is_built_in(policy: Policy) -> bool:
    """Whether it is one of Kendall's own."""
    return type(policy) in _BUILT_IN


def may_preempt(policy: Policy) -> bool:
    """Whether it may take requests out of service: one from outside may."""
    return type(policy) not in _BUILT_IN or order_of(policy).preemptive


def is_first_come(policy: Policy) -> bool:
    """Whether it is built in and serves in the order of arrival, as the formulas have it."""
    return type(policy) in _BUILT_IN and policy.order == FIRST_COME.name  # type: ignore[attr-defined]


def policy_class(name: str) -> type[Policy] | None:
    """The class of a policy; None for an unknown name. Raises SpecError where it cannot be used."""
    if name in POLICIES:
        return POLICIES[name]
    own, packages = of_modules().get(name), _packages().get(name, ())
    if own is not None:
        return own
    return _of_package(name, packages) if packages else None


def policy_names() -> tuple[str, ...]:
    """Of all policies. Imports no package. Raises SpecError for a module that cannot be used."""
    return tuple(dict.fromkeys((*POLICIES, *of_modules(), *_packages())))


def usable_policies() -> tuple[str, ...]:
    """Names of those that a text may have, for a message that offers them. Imports the packages."""
    return tuple(dict.fromkeys(each.name for each in every_policy() if each.fault is None))


def not_used(name: str) -> str | None:
    """Why a package's policy is not the one of this name; None where no package has one. Imports
    none.
    """
    points = _packages().get(name, ()) if name in POLICIES else ()
    if not points:
        return None
    return (
        f"got policy {name!r} of the package {' and '.join(map(_package, points))}, which is not "
        f"used: {name} is the built-in policy; expected another name in the package"
    )


def every_policy() -> list[Listed]:
    """All, the broken ones with the reason. Imports the packages."""
    listed = [Listed(name, BUILT_IN, cls) for name, cls in POLICIES.items()]
    for module in _named_modules():
        try:
            listed += [Listed(name, module, cls) for name, cls in _of_module(module).items()]
        except SpecError as error:
            listed.append(Listed(module, module, None, str(error)))
    for name, points in _packages().items():
        source = " and ".join(map(_package, points))
        try:
            listed.append(Listed(name, source, _of_package(name, points)))
        except SpecError as error:
            listed.append(Listed(name, source, None, str(error)))
    return listed


def use_modules(modules: Sequence[str] | None) -> None:
    """Make the policies of these modules known, here and in the processes that this one starts.
    None: those of KENDALL_POLICY_MODULE, as before. Raises SpecError.
    """
    if modules is None:
        return
    named = [_absolute(module) for module in modules]
    for module in named:
        if not module:
            raise SpecError("got --policy-module ''; expected a module, or a .py file")
        if any(character.isspace() for character in module):
            raise SpecError(f"got --policy-module {module!r}; expected a path without spaces")
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = " ".join(dict.fromkeys(named))
    try:
        of_modules()
    except SpecError:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before
        raise


def of_modules() -> dict[str, type[Policy]]:
    """Policies of KENDALL_POLICY_MODULE by name. Raises SpecError."""
    found: dict[str, type[Policy]] = {}
    for module in _named_modules():
        for name, cls in _of_module(module).items():
            if name in found or name in _packages():
                raise SpecError(
                    f"got policy {name!r} of {module} and of another module or package; expected "
                    "it once: rename one, or leave one out"
                )
            found[name] = cls
    return found


def class_fault(cls: Any) -> str | None:
    """Why a class is no policy: what was got, what was expected. None for a policy."""
    if not isinstance(cls, type) or not dataclasses.is_dataclass(cls):
        return f"got {_called(cls)}; expected a dataclass with a method decide(self, state, now)"
    fault = _shape_fault(cls) or _value_fault(cls)
    return f"got the class {cls.__name__}{fault}" if fault else _field_fault(cls)


def _shape_fault(cls: Any) -> str | None:
    if not callable(getattr(cls, "decide", None)) or cls.decide is Policy.decide:
        return " without decide; expected a method decide(self, state, now)"
    if not cls.__dataclass_params__.frozen:
        return ", which can be changed; expected @dataclass(frozen=True)"
    if parents := [base.__name__ for base in cls.__mro__[1:] if base in POLICIES.values()]:
        return (
            f", a subclass of {parents[0]}; expected a class of its own: the formulas would take "
            f"it for {parents[0]}"
        )
    return None


def _field_fault(cls: type) -> str | None:
    try:
        parameters_of(cls)
    except SpecError as error:
        return str(error)
    except (NameError, TypeError) as error:
        return (
            f"got the class {cls.__name__}, whose annotations cannot be read ({error}); expected "
            "int, float, bool or str"
        )
    return None


def _value_fault(cls: Any) -> str | None:
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        return (
            f" with name={name!r}; expected a name of small letters, digits, - and _, as in "
            'name: ClassVar[str] = "shortest"'
        )
    for switch in _SWITCHES:
        if not isinstance(getattr(cls, switch, None), bool):
            return (
                f" without {switch} = True or False; expected it, or a subclass of "
                "kendall.policies.Policy, which has a default"
            )
    release = getattr(cls, "release", None)
    if release not in _RELEASES:
        return f' with release={release!r}; expected "batch" or "request"'
    if cls.joins_running and (cls.padded or cls.release == "batch"):
        return (
            ' with joins_running; expected padded = False and release = "request": a request that '
            "joins others ends on its own"
        )
    return None


def _checked(cls: Any, where: str) -> type[Policy]:
    if fault := class_fault(cls):
        raise SpecError(f"{fault} (in {where})")
    checked: type[Policy] = cls
    if checked.name in POLICIES:
        raise SpecError(
            f"got policy {checked.name!r} of {where}, which is the name of a built-in policy; "
            "expected another name"
        )
    return checked


# modules


def _named_modules() -> list[str]:
    return os.environ.get(VARIABLE, "").split()


def _absolute(module: str) -> str:
    return str(Path(module).absolute()) if _is_path(module) else module


def _is_path(module: str) -> bool:
    return module.endswith(".py") or os.sep in module


def _of_module(module: str) -> dict[str, type[Policy]]:
    if module not in _modules:
        imported = _imported(module)
        found: dict[str, type[Policy]] = {}
        for value in vars(imported).values():
            if _is_candidate(value, imported.__name__):
                cls = _checked(value, module)
                if found.setdefault(cls.name, cls) is not cls:
                    raise SpecError(
                        f"got two classes with the name {cls.name!r} in {module}; expected one"
                    )
        if not found:
            raise SpecError(
                f"got --policy-module {module}, which has no policy; expected a frozen dataclass "
                "with a method decide(self, state, now)"
            )
        _modules[module] = found
    return _modules[module]


def _is_candidate(value: object, module: str) -> bool:
    """A class of that module, or of its package, that decides."""
    if not isinstance(value, type) or not hasattr(value, "decide"):
        return False
    return value.__module__ == module or value.__module__.startswith(f"{module}.")


def _imported(module: str) -> ModuleType:
    try:
        return _from_file(Path(module)) if _is_path(module) else importlib.import_module(module)
    except (Exception, SystemExit) as error:
        expected = (
            "the name of a module that Python finds, or the path of a .py file"
            if _is_missing(module, error)
            else "a module without this error"
        )
        raise SpecError(
            f"got --policy-module {module}, which cannot be imported ({_reason(error)}); expected "
            f"{expected}"
        ) from error


def _is_missing(module: str, error: BaseException) -> bool:
    """There is no such module; else something in it failed."""
    if _is_path(module):
        return not Path(module).is_file()
    return isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")


def _from_file(path: Path) -> ModuleType:
    name = f"kendall_policy_{re.sub(r'[^A-Za-z0-9_]', '_', str(path))}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError("it is no .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # a dataclass looks for its module there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


# packages


@functools.cache
def _packages() -> dict[str, tuple[importlib.metadata.EntryPoint, ...]]:
    """Entry points by name. Reads the metadata of every installed package: some 10 ms, once."""
    found: dict[str, tuple[importlib.metadata.EntryPoint, ...]] = {}
    for point in importlib.metadata.entry_points(group=GROUP):
        found[point.name] = (*found.get(point.name, ()), point)
    return found


@functools.cache
def _of_package(name: str, points: tuple[importlib.metadata.EntryPoint, ...]) -> type[Policy]:
    if len(points) > 1:
        raise SpecError(
            f"got policy {name!r} of the packages {' and '.join(map(_package, points))}; expected "
            "it of one: uninstall the others"
        )
    (point,) = points
    where = f"package {_package(point)}, {point.value}"
    try:
        loaded = point.load()
    except (Exception, SystemExit) as error:
        raise SpecError(
            f"got policy {name!r} of {where}, which cannot be imported ({_reason(error)}); "
            "expected a class: repair the package, or uninstall it"
        ) from error
    cls = _checked(loaded, where)
    if cls.name != name:
        raise SpecError(
            f"got the entry point {name!r} of {where}, a class with the name {cls.name!r}; "
            "expected the same name"
        )
    return cls


def _package(point: importlib.metadata.EntryPoint) -> str:
    return "?" if point.dist is None else point.dist.name


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0]


def _called(value: object) -> str:
    return getattr(value, "__name__", None) or f"{value!r:.60}"
