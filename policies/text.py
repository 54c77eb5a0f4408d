"""The text form of policies and distributions: `name[:key=value{,key=value}]`, parsed, checked
and written canonically.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from kendall.policies.core import Policy
from kendall.policies.errors import SpecError
from kendall.policies.ordered import KEYS, Ordered
from kendall.policies.orders import FIRST_COME, ORDERS
from kendall.policies.parameters import (
    LARGEST_BATCH,
    SIZES,
    fields_of,
    format_number,
    format_value,
    parameters_of,
    parse_number,
    suggest,
)
from kendall.policies.registry import POLICIES, policy_class, usable_policies

LARGEST_SPELLED_OUT = 1e15
EXAMPLES = {  # of the policies with a batch size
    "fixed": "fixed:batch_size=8",
    **{name: f"{name}:max_batch_size=8" for name in ("capped", "elastic", "continuous")},
}
ORDER_EXAMPLES = {name: f"{name}:order=spjf" for name in POLICIES}
__all__ = [
    "LARGEST_BATCH",
    "ORDERS",
    "POLICIES",
    "SpecError",
    "check_text",
    "counted",
    "first_come_form",
    "format_number",
    "format_policy",
    "one_of",
    "order_text",
    "parse_number",
    "parse_policy",
    "policy_batch_size",
    "short_number",
    "split_orders",
    "split_pairs",
    "split_spec",
    "suggest",
    "with_order",
]


def check_text(name: str, value: object, example: str) -> None:
    """Raises SpecError for anything but a str; `name` is what Python and the command line call
    it.
    """
    if not isinstance(value, str):
        raise SpecError(f"got {name}={value!r}; expected a text, for example {example!r}")


def check_keys(pairs: Iterable[str], known: Sequence[str], of: str, expected: str = "") -> None:
    """Raises SpecError for a key that is not known; `of`: whose keys they are."""
    for key in pairs:
        if key not in known:
            expected = expected or ", ".join(known) or "no key"
            raise SpecError(
                f"got key {key!r} for {of}; expected {expected}{suggest(key, tuple(known))}"
            )


def split_spec(text: str, examples: Mapping[str, str] | None = None) -> tuple[str, dict[str, str]]:
    """`"name:a=1,b=2"` as `("name", {"a": "1", "b": "2"})`. Raises SpecError where the grammar
    is broken; `examples` by name.
    """
    name, colon, rest = text.strip().partition(":")
    if not name:
        raise SpecError(f"got {text!r}; expected name[:key=value,...]")
    example = (examples or {}).get(name, "")
    if colon and not rest:
        raise SpecError(f"got {text!r}; expected key=value after the colon{_as_in(example)}")
    return name, split_pairs(rest, context=text, example=example) if rest else {}


def split_pairs(text: str, context: str, example: str = "") -> dict[str, str]:
    """`"a=1,b=2"` as a dict. Raises SpecError on an empty or repeated key, and on an empty
    value.
    """
    pairs: dict[str, str] = {}
    for item in text.split(","):
        key, equals, value = (part.strip() for part in item.partition("="))
        if key and equals and not value:
            raise SpecError(
                f"got {key} without a value in {context!r}; expected {key}=VALUE"
                f"{_as_in(example if f'{key}=' in example else '')}"
            )
        if not (key and equals):
            raise SpecError(
                f"got {item!r} in {context!r}; expected key=value{_as_in(_filled(example, text))}"
            )
        if key in pairs:
            raise SpecError(f"got {key} twice in {context!r}; expected it once")
        pairs[key] = value
    return pairs


def _as_in(example: str) -> str:
    return f", for example {example}" if example else ""


def _filled(example: str, values: str) -> str:
    """The example with the given values filled in, if there is one number for each key:
    `geometric:mean=64` for `64`.
    """
    name, _, rest = example.partition(":")
    keys, given = [pair.partition("=")[0] for pair in rest.split(",")], values.split(",")
    if (
        not rest
        or "=" in values
        or not all(_is_number(value) for value in given)
        or len(keys) != len(given)
    ):
        return example
    return f"{name}:" + ",".join(
        f"{key}={value.strip()}" for key, value in zip(keys, given, strict=True)
    )


def _is_number(text: str) -> bool:
    try:
        parse_number("", text, "")
    except SpecError:
        return False
    return True


def short_form(text: str) -> str:
    """The name and the values without their keys: `fixed 8 0.5`. For tables; nothing reads it
    back.
    """
    name, _, parameters = text.partition(":")
    return " ".join([name, *(pair.partition("=")[2] for pair in parameters.split(",") if pair)])


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """`"1 request"`, `"2,000 requests"`; a plural that is not the noun and an s is given."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def short_number(value: float, digits: int = 4) -> str:
    """For people: so many significant digits, without an exponent for large numbers (`11,160`);
    `-` for not a number.
    """
    if math.isnan(value):
        return "-"
    text = f"{value:.{digits}g}"
    return f"{float(text):,.0f}" if "e+" in text and abs(value) < LARGEST_SPELLED_OUT else text


def one_of(flag: str, value: str, literal: Any) -> Any:
    """The value, which is one of a Literal's. Raises SpecError."""
    known = get_args(literal)
    if value not in known:
        raise SpecError(
            f"got {flag} {value!r}; expected {', '.join(known[:-1])} or "
            f"{known[-1]}{suggest(value, known)}"
        )
    return value


class CommaList:
    """The type of an option that takes several values with commas between them, as one text."""

    __name__ = "text"  # for the help

    def __call__(self, text: str) -> str:
        """As it is; the command parses it."""
        return text


def parse_policy(text: str) -> Policy:
    """The policy that a text names. Raises SpecError: no text, unknown name or key, missing key,
    value out of range.
    """
    check_text("policy", text, "capped:max_batch_size=8")
    if not text.strip():
        raise SpecError(
            f"got an empty policy; expected one of {', '.join(usable_policies())}, for example "
            "capped:max_batch_size=8"
        )
    name, pairs = split_spec(
        text, ORDER_EXAMPLES if ":order" in text or "order=" in text else EXAMPLES
    )
    cls = policy_class(name)
    if cls is None:
        names = usable_policies()
        first, _, rest = text.partition(",")
        if first in names and rest:
            raise SpecError(f"got policy {text!r}; expected a colon: {first}:{rest}")
        raise SpecError(
            f"got policy {name!r}; expected one of {', '.join(names)}{suggest(name, names)}"
        )
    known = parameters_of(cls)
    check_keys(pairs, tuple(known), f"policy {name}")
    missing = [key for key, parameter in known.items() if parameter.required and key not in pairs]
    if missing:
        raise SpecError(
            f"got {text!r}; expected {missing[0]} too, for example {name}:{missing[0]}=8"
        )
    return _built(cls, text, {key: known[key].parse(name, pairs[key]) for key in pairs})


def _built(cls: type[Policy], text: str, values: Mapping[str, Any]) -> Policy:
    try:
        return cls(**values)
    except Exception as error:  # noqa: BLE001 - of its own __post_init__
        reason = one_line(error) or type(error).__name__
        raise SpecError(f"got {text!r}, which policy {cls.name} refuses: {reason}") from None


def one_line(error: BaseException) -> str:
    """Its text, of a class from outside, without line breaks."""
    return " ".join(str(error).split())


def format_policy(policy: Policy) -> str:
    """The canonical text: keys in field order, defaults left out, shortest numbers."""
    parts = []
    for field in fields_of(type(policy)):
        value = getattr(policy, field.name)
        if value != field.default:
            parts.append(f"{field.name}={format_value(value)}")
    return policy.name + (":" + ",".join(parts) if parts else "")


def split_orders(text: str) -> tuple[str, ...]:
    """`"fcfs,trail:c=0.8,mlfq:quantum=8,levels=3"` as three texts of orders: a part with `=` and
    without a name is a further parameter of the order before it. Raises SpecError.
    """
    found: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        if "=" in part and ":" not in part and found:
            found[-1] += f"{',' if ':' in found[-1] else ':'}{part}"
        elif part and not part.startswith(":") and "=" not in part.partition(":")[0]:
            found.append(part)
        else:
            raise SpecError(
                f"got orders {text!r}; expected names with commas between them, for example "
                "fcfs,spjf:aging=0.02,trail:c=0.8"
            )
    return tuple(found)


def with_order(policy: Policy, order: str) -> Policy:
    """The policy under the order that a text names, such as `spjf` or `mlfq:quantum=8,levels=3`.
    Raises SpecError: one of its own, a key or value that it does not have, an order that this
    policy cannot serve.
    """
    own, text = order_text(policy), format_policy(policy)
    if own != FIRST_COME.name:
        raise SpecError(
            f"got order {order} for {text}, which has an order of its own; expected a policy "
            "without one"
        )
    name, pairs = split_spec(order)
    keys = ",".join(f"{key}={value}" for key, value in {"order": name, **pairs}.items())
    return parse_policy(f"{text}{',' if ':' in text else ':'}{keys}")


def order_text(policy: Policy) -> str:
    """The order of service with its parameters, as `with_order` reads it; `fcfs` for a policy from
    outside.
    """
    if not isinstance(policy, Ordered):
        return FIRST_COME.name
    given = {field.name: getattr(policy, field.name) for field in fields_of(type(policy))}
    pairs = [
        f"{key}={format_value(given[key])}"
        for key in KEYS
        if key != "order" and given[key] is not None
    ]
    return policy.order + (":" + ",".join(pairs) if pairs else "")


def first_come_form(policy: Policy) -> Policy:
    """The same policy in the order of arrival."""
    if not isinstance(policy, Ordered):
        return policy
    return dataclasses.replace(policy, **dict.fromkeys(KEYS[1:]), order=FIRST_COME.name)  # type: ignore[arg-type]


def policy_batch_size(policy: Policy) -> int | None:
    """The largest batch the policy itself asks for; None where it sets no bound."""
    bound = next(filter(None, (getattr(policy, name, None) for name in SIZES)), None)
    return None if bound is None else int(bound)
