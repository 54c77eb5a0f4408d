"""Forms are compiled in a process of their own, under a time limit: a heavy or deadly one costs
nobody but its own client.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator

import pytest

from kendall.server.engines.base import (
    CALLER,
    BusyError,
    InvalidSamplingError,
    OverBudgetError,
    Sampling,
    Structured,
)
from kendall.server.engines.vllm import forms as vllm_forms
from kendall.server.engines.vllm.forms import CompileBudgets, CompiledForms, FormCompiler
from kendall.server.security.settings import SecuritySettings
from tests.eventually import eventually
from tests.server import form_workers
from tests.server.asgi import call, completion, running
from tests.virtual_time import run_virtual

LONG = 60.0  # seconds: a limit that no good form meets on any machine


def form(text: str) -> Sampling:
    return Sampling(max_tokens=1, structured=Structured("regex", text))


@contextlib.asynccontextmanager
async def compiler(limit: float = LONG) -> AsyncIterator[FormCompiler]:
    made = FormCompiler("with", limit, form_workers.work)
    try:
        yield made
    finally:
        made.close()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def ended(pid: int) -> bool:
    return bool(await eventually(lambda: not alive(pid)))


def test_good_forms_are_prepared_by_one_process_which_ends_with_the_engine() -> None:
    async def main() -> None:
        async with compiler() as forms:
            assert await forms.prepare(form("a")) == "with a"
            pids = {await forms.prepare(form(text)) for text in ("pid 1", "pid 2")}
            assert len(pids) == 1
        assert await ended(pids.pop())

    asyncio.run(main())


def test_a_bad_form_is_the_clients_fault_and_the_next_one_is_compiled() -> None:
    async def main() -> None:
        async with compiler() as forms:
            with pytest.raises(InvalidSamplingError, match="got a bad form") as error:
                await forms.prepare(form("bad"))
            assert error.value.param == "guided_regex"
            assert await forms.prepare(form("a")) == "with a"

    asyncio.run(main())


def test_a_slow_form_is_given_up_and_refused_at_once_when_it_comes_again() -> None:
    """For a while: the machine may only have been busy."""

    async def main() -> None:
        async with compiler() as forms:
            pid = await forms.prepare(form("pid"))
            forms._limit = 0.2
            with pytest.raises(InvalidSamplingError, match="max-form-compile-time"):
                await forms.prepare(form("slow"))
            assert await ended(pid), "nobody goes on compiling it"
            forms._limit = LONG
            with pytest.raises(InvalidSamplingError, match="max-form-compile-time"):
                # it is not tried again
                await asyncio.wait_for(forms.prepare(form("slow")), LONG / 2)
            assert await forms.prepare(form("a")) == "with a"
            forms._refused.update(
                (key, (message, 0.0)) for key, (message, _) in list(forms._refused.items())
            )  # ten minutes later
            forms._limit = 0.2
            began = time.monotonic()  # noqa: TID251
            with pytest.raises(InvalidSamplingError, match="max-form-compile-time"):
                await forms.prepare(form("slow"))
            assert time.monotonic() - began > 0.2, "it was tried again"  # noqa: TID251

    asyncio.run(main())


def test_a_form_that_crashes_its_compiler_crashes_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said = "got a structured-output definition that crashes its compiler; expected another one"

    async def main() -> None:
        async with compiler() as forms:
            for _ in range(2):
                with pytest.raises(InvalidSamplingError, match=said):
                    await forms.prepare(form("crash"))
            assert caplog.messages == [said], "once: it is not tried again"
            assert await forms.prepare(form("a")) == "with a"

    asyncio.run(main())


def test_a_client_that_leaves_ends_the_compilation_and_the_next_form_has_its_turn() -> None:
    async def main() -> None:
        async with compiler() as forms:
            pid = await forms.prepare(form("pid"))
            slow = asyncio.create_task(forms.prepare(form("slow")))
            await asyncio.sleep(0.1)
            behind = asyncio.create_task(forms.prepare(form("a")))
            await asyncio.sleep(0.1)
            slow.cancel()
            assert await behind == "with a"
            assert await ended(pid)

    asyncio.run(main())


def test_a_process_that_was_killed_while_idle_is_replaced_and_no_form_is_blamed() -> None:
    async def main() -> None:
        async with compiler() as forms:
            pid = await forms.prepare(form("pid"))
            os.kill(pid, signal.SIGKILL)
            assert await ended(pid)
            assert await forms.prepare(form("a")) == "with a"

    asyncio.run(main())


def test_no_more_than_64_forms_of_a_caller_wait() -> None:
    async def main() -> None:
        async with compiler() as forms:
            texts = ["slow", *(f"a{number}" for number in range(64))]  # the first one is compiled
            waiting = [asyncio.create_task(forms.prepare(form(text))) for text in texts]
            await asyncio.sleep(0)
            with pytest.raises(BusyError, match=r"^64 structured-output definitions wait"):
                await forms.prepare(form("b"))
            waiting[0].cancel()
            assert await asyncio.gather(*waiting[1:]) == [f"with {text}" for text in texts[1:]]
            assert await forms.prepare(form("b")) == "with b"

    asyncio.run(main())


def test_a_compiler_that_does_not_start_is_said_to() -> None:
    async def main() -> None:
        forms = FormCompiler("with", LONG, form_workers.never_ready)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="did not start"):
                await forms.prepare(form("a"))
        forms.close()

    asyncio.run(main())


HEAVY = [
    {"guided_json": {"enum": [f"word {index}" for index in range(2000)]}},
    {"guided_regex": "a|" * 10_000},
    {"guided_grammar": "root ::= " + "a" * 20_000},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": {"enum": ["x" * 20_000]}},
        }
    },
    {"structured_outputs": {"choice": ["x" * 20_000]}},
]


@pytest.mark.parametrize("fields", HEAVY, ids=lambda fields: next(iter(fields)))
def test_a_form_that_is_too_large_is_refused_before_anybody_compiles_it(
    fields: dict[str, object],
) -> None:
    async def main() -> None:
        async with running(security=SecuritySettings(max_form_bytes=16_000)) as (app, _):
            refused = await call(app, "POST", "/v1/completions", completion(**fields))
            error = refused.json()["error"]
            assert (refused.status, error["code"], error["param"]) == (
                400,
                "form_too_large",
                next(iter(fields)),
            )

    run_virtual(main())


def test_a_large_prompt_does_not_make_a_form_large() -> None:
    async def main() -> None:
        async with running(security=SecuritySettings(max_form_bytes=1000)) as (app, _):
            asked = await call(
                app, "POST", "/v1/completions", completion(prompt="word " * 1000, guided_regex="a+")
            )
            assert asked.status == 501, "the emulated engine serves no forms, whatever their size"

    run_virtual(main())


async def of(caller: str, forms: FormCompiler, text: str) -> object:
    """Prepared for this caller."""
    CALLER.set(caller)
    return await forms.prepare(form(text))


def test_a_caller_with_slow_forms_holds_up_no_other() -> None:
    """Eight of them, in two processes: another caller's has its turn at once."""

    async def main() -> None:
        async with compiler() as forms:
            await of("b", forms, "warm")
            slow = [asyncio.create_task(of("a", forms, f"takes 30 {n}")) for n in range(8)]
            await asyncio.sleep(0.2)
            other = asyncio.create_task(of("b", forms, "a"))
            assert await asyncio.wait_for(other, 25) == "with a"
            assert not any(task.done() for task in slow)
            for task in slow:
                task.cancel()
            await asyncio.gather(*slow, return_exceptions=True)
            assert await of("a", forms, "c") == "with c"

    asyncio.run(main())


def test_a_form_that_was_compiled_is_known_and_the_oldest_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_forms, "MOST_KNOWN", 2)

    async def main() -> None:
        async with compiler() as forms:
            first, second, third = (form(text) for text in "abc")
            known = [each.structured for each in (first, second, third)]
            assert forms.known(known[0]) is None  # type: ignore[arg-type]
            await forms.prepare(first)
            await forms.prepare(second)
            assert forms.known(known[0]) == "with a"  # type: ignore[arg-type]
            await forms.prepare(third)
            assert [forms.known(each) for each in known] == [  # type: ignore[arg-type]
                "with a",
                None,
                "with c",
            ]
            with pytest.raises(InvalidSamplingError):
                await forms.prepare(form("bad"))
            assert forms.known(form("bad").structured) is None  # type: ignore[arg-type]

    asyncio.run(main())


def refused(budgets: CompileBudgets, caller: str, now: float) -> float | None:
    """In how many seconds it may retry."""
    try:
        budgets.check(caller, now)
    except OverBudgetError as error:
        return error.retry_after
    return None


def test_a_caller_has_20_seconds_at_once_and_gains_one_in_four() -> None:
    budgets = CompileBudgets()
    assert refused(budgets, "a", 0.0) is None
    budgets.spend("a", 19.0, 100.0)
    assert refused(budgets, "a", 100.0) is None
    budgets.spend("a", 3.0, 100.0)
    assert refused(budgets, "a", 100.0) == pytest.approx((1 + 2) / 0.25)
    with pytest.raises(OverBudgetError, match="definitions took more than 20 s to compile;"):
        budgets.check("a", 100.0)
    assert refused(budgets, "b", 100.0) is None, "others have their own"
    assert refused(budgets, "a", 108.0) == pytest.approx(1 / 0.25), "nothing is left yet"
    assert refused(budgets, "a", 108.1) is None
    budgets.spend("a", 20.0, 1e6)
    assert refused(budgets, "a", 1e6) == pytest.approx(4.0), "it never has more than 20"


def test_of_4096_callers_it_is_known_what_they_have_left() -> None:
    budgets = CompileBudgets()
    budgets.spend("a", 30.0, 0.0)
    budgets.spend("b", 30.0, 0.0)
    budgets.spend("a", 1.0, 0.0)
    for number in range(4094):
        budgets.spend(str(number), 1.0, 0.0)
    assert refused(budgets, "b", 0.0) is not None
    budgets.spend("one more", 1.0, 0.0)
    assert refused(budgets, "b", 0.0) is None, "the one that compiled longest ago is forgotten"
    assert refused(budgets, "a", 0.0) is not None


def test_4096_forms_of_16_mib_together_are_kept_those_that_were_asked_for_last() -> None:
    forms, most = CompiledForms(), 16 << 20
    for number in range(4096):
        forms.add(b"%d" % number, 1, number)
    assert forms.get(b"0") == 0
    forms.add(b"more", 1, "more")
    assert (forms.get(b"0"), forms.get(b"1"), forms.get(b"2")) == (0, None, 2)
    forms = CompiledForms()
    forms.add(b"a", most // 2, "a")
    forms.add(b"a", most // 2, "again")
    forms.add(b"b", most // 2, "b")
    assert (forms.get(b"a"), forms.get(b"b")) == ("a", "b"), "one that is known is not added"
    forms.add(b"c", 1, "c")
    assert (forms.get(b"a"), forms.get(b"b"), forms.get(b"c")) == (None, "b", "c")


@pytest.mark.slow
def test_the_seconds_that_a_callers_forms_take_are_budgeted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_forms, "BURST", 2.0)
    monkeypatch.setattr(vllm_forms, "SHARE", 1.0)

    async def main() -> None:
        async with compiler() as forms:
            await of("b", forms, "warm")
            await of("a", forms, "takes 2.1")
            with pytest.raises(OverBudgetError, match=r"took more than 2 s to compile") as over:
                await of("a", forms, "a")
            assert 0 < over.value.retry_after < 10
            assert await of("b", forms, "a") == "with a"
            waiting = [asyncio.create_task(of("c", forms, f"takes 2.5 {n}")) for n in range(3)]
            outcomes = await asyncio.gather(*waiting, return_exceptions=True)
            assert [type(each) for each in outcomes] == [str, OverBudgetError, OverBudgetError]
            await asyncio.sleep(1.5)
            assert await of("a", forms, "again") == "with again"

    asyncio.run(main())
