"""`kr`, the cost of resuming a request behind tokens that it has made: the law and its texts, and
the engine that obeys it.
"""

import dataclasses
import json

import pytest

from policies.text import SpecError
from queueing.latency.law import LatencyModel, parse_law
from queueing.latency.profile import Profile, load_profile

PLAIN = parse_law("k1=0.25e-3,k2=2e-3,k3=25e-6,k4=0.9e-3,kp=1e-5,turnaround=1.5e-3,speed=1.3")
LAW = dataclasses.replace(PLAIN, kr=8e-3)


# the law


def test_the_text_of_a_law_has_its_resume_cost_where_there_is_one() -> None:
    assert "kr=0.008" in str(LAW)
    assert parse_law(str(LAW)) == LAW
    assert "kr" not in str(PLAIN)
    assert parse_law("k1=0,k2=0,k3=0,k4=1,kr=0") == LatencyModel(k4=1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("kr=-0.001", "got kr=-0.001 in a latency law; expected seconds >= 0"),
        ("kr=8ms", "got kr='8ms' in .*; expected seconds without a unit: kr=0.008"),
        ("kr=inf", "got kr="),
    ],
)
def test_a_resume_costs_seconds_and_never_less_than_none(given: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse_law(f"k1=0,k2=0,k3=0,k4=1,{given}")


def test_a_resume_is_slowed_down_with_the_machine() -> None:
    for cost in (LatencyModel.setup, LatencyModel.admission):
        assert cost(LAW, 3, 10, 2) - cost(LAW, 3, 10) == pytest.approx(2 * 1.3 * 8e-3)
        assert cost(LAW, 3, 10) == cost(PLAIN, 3, 10) == cost(PLAIN, 3, 10, 2)


def test_a_profile_without_resume_cost_is_written_and_read_as_before_there_was_one(
    tmp_path,
) -> None:  # type: ignore[no-untyped-def]
    bare = Profile(name="bare", law=PLAIN)
    told = Profile(name="told", law=LAW)
    names = [field.name for field in dataclasses.fields(LatencyModel)]
    for profile, expected in ((bare, [n for n in names if n != "kr"]), (told, names)):
        path = tmp_path / "profile.json"
        profile.save(path)
        assert load_profile(str(path)) == profile == Profile.from_dict(profile.to_dict())
        for written in (path.read_text(), profile.to_json()):
            assert list(json.loads(written)["law"]) == expected
    assert load_profile("yang-llama2-7b-a100").law.kr == 0
