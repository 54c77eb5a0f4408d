"""Mutation test: a seeded sample of small faults in the code, each held against the quick tests
that execute its line. Which these are is recorded first: 30 minutes, kept in .tests-by-line/
(--record makes it anew).

A fault is killed where a test fails or hangs that passes without the fault.
Those that may survive are in mutants.toml with a reason; no test is held against them, and a second
figure counts them as survivors. Ends with 1 where less than 90 % of all, or 80 % of a group, are
killed (85 % and 75 % in the second figure), and with 2 where tests fail without a fault.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from queue import SimpleQueue

import tests_by_line
from faults import Mutant, mutants

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = tomllib.loads((ROOT / "tools" / "mutants.toml").read_text(encoding="utf-8"))
LIMIT = 240  # seconds of tests a fault; more on a busy machine (--limit)
TEST_LIMIT = 90  # seconds of one test: some run what the README prints
PYTEST = (
    "-m",
    "pytest",
    "-qx",
    "--tb=no",
    "-rfE",
    "--timeout",
    str(TEST_LIMIT),
    "-p",
    "no:cacheprovider",
    "-pno:randomly",
    "--hypothesis-profile=unshrunk",
    # compiled code that never returns lets no other thread run
    "-ofaulthandler_exit_on_timeout=true",
    f"-ofaulthandler_timeout={TEST_LIMIT + 5}",
)
PASSED = (0, 5)  # 5: every test of the file is slow


def files_of(group: str) -> list[Path]:
    """Of its files and folders in mutants.toml."""
    paths = [path for pattern in SETTINGS["groups"][group] for path in sorted(ROOT.glob(pattern))]
    return [
        file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])
    ]


def sample(groups: list[str], seed: int, count: int) -> list[Mutant]:
    """As many of each group."""
    chance, chosen = random.Random(seed), []
    for group in groups:
        every = [mutant for path in files_of(group) for mutant in mutants(group, path, ROOT)]
        chosen += chance.sample(every, min(len(every), count // len(groups)))
    return chance.sample(chosen, len(chosen))


def is_known(mutant: Mutant) -> bool:
    """By its file, its texts and, where the row has one, the line `on` which it is."""
    rows = [
        row
        for row in SETTINGS.get("known", ())
        if (row["file"], row["was"], row["now"]) == (mutant.file, mutant.was, mutant.now)
    ]
    return any(
        "on" not in row or row["on"] == lines_of(mutant.file)[mutant.line - 1].strip()
        for row in rows
    )


@cache
def lines_of(file: str) -> list[str]:
    """Of the code without faults."""
    return (ROOT / file).read_text(encoding="utf-8").splitlines()


def failing(
    tests: Sequence[str], place: Path, seconds: float, compiled: str = ".numba"
) -> tuple[str, ...]:
    """The first test that fails in a copy of the tree, whose kernels are kept in the folder
    `compiled`; all of them where one hangs, none where all pass.
    """
    environment = os.environ | {
        "PYTHONPATH": str(place),
        "PYTHONDONTWRITEBYTECODE": "1",
        "NUMBA_CACHE_DIR": str(place / compiled),
    }
    asked = place / ".tests"
    asked.write_text("\n".join(tests), encoding="utf-8")
    with subprocess.Popen(
        [sys.executable, *PYTEST, f"@{asked}"],
        cwd=place,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return tuple(tests)
        finally:
            with suppress(ProcessLookupError):  # with the servers that its tests started
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode in PASSED:
        return ()
    failed = re.compile("^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE).findall(said)
    return (next((test for test in tests if test in failed), tests[0]),)


def killers(mutant: Mutant, place: Path, limit: float) -> tuple[str, ...]:
    """The first test that fails in a copy of the tree that has the fault, or those that hang."""
    target = place / mutant.file
    before = target.read_text(encoding="utf-8")
    tests = tests_by_line.tests_of(mutant.file, mutant.line)
    if not tests:
        return ()
    # kernels of other files are not compiled again for a part of theirs that has changed
    compiled = f".numba-{mutant.file.replace('/', '-')}" if "@inner" in before else ".numba"
    target.write_text(mutant.text, encoding="utf-8")
    try:
        return failing(tests, place, limit, compiled)
    finally:
        target.write_text(before, encoding="utf-8")
        if compiled != ".numba":
            shutil.rmtree(place / compiled, ignore_errors=True)


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (("--seed", 1), ("--count", 400), ("--workers", 2), ("--limit", LIMIT)):
        parser.add_argument(name, type=int, default=value)
    parser.add_argument("--group", choices=SETTINGS["groups"])
    parser.add_argument("--record", action="store_true", help="which tests execute which lines")
    options = parser.parse_args()
    if options.record or not tests_by_line.TESTS.is_file():
        tests_by_line.record(options.workers)
    groups = [options.group] if options.group else list(SETTINGS["groups"])
    chosen, places = sample(groups, options.seed, options.count), SimpleQueue[Path]()
    results: dict[str, list[str]] = {group: [] for group in groups}
    sound: dict[tuple[str, ...], bool] = {}  # what killed a fault: whether it passes without one

    def judge(mutant: Mutant) -> None:
        if is_known(mutant):
            report(mutant, "known")
            return
        place = places.get()
        tests = killers(mutant, place, options.limit)
        if tests and tests not in sound:
            sound[tests] = not failing(tests, place, options.limit)
        places.put(place)
        report(mutant, "killed" if tests and sound[tests] else "SURVIVED")

    def report(mutant: Mutant, fate: str) -> None:
        results[mutant.group].append(fate)
        done = sum(map(len, results.values()))
        print(
            f"{done:3d}/{len(chosen)} {fate:8s} {mutant.file}:{mutant.line}  {mutant.was}  ->  "
            f"{mutant.now}",
            flush=True,
        )

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.workers) as pool:
        for number in range(options.workers):
            places.put(
                Path(
                    shutil.copytree(
                        ROOT,
                        Path(folder) / str(number),
                        symlinks=True,
                        ignore=shutil.ignore_patterns(".*", "__pycache__", "runs"),
                    )
                )
            )
        list(pool.map(judge, chosen))
    return conclusion(results, sorted({tests[0] for tests, good in sound.items() if not good}))


def conclusion(results: dict[str, list[str]], broken: list[str]) -> int:
    """Prints the shares of each group and of all, and the tests that fail without a fault; what
    the command ends with.
    """
    results["all"] = [fate for each in results.values() for fate in each]
    for group, fates in results.items():
        judged, drawn = shares(fates)
        killed, known = fates.count("killed"), fates.count("known")
        print(
            f"{group:30s} {killed} of {len(fates) - known} killed, {judged:.0%}; "
            f"{drawn:.0%} with {known} known as survivors"
        )
    if broken:
        print("fail without a fault:", *broken)
        return 2
    return 0 if all(is_enough(fates, group == "all") for group, fates in results.items()) else 1


def shares(fates: Sequence[str]) -> tuple[float, float]:
    """Killed of those that tests were held against, and of all that were drawn."""
    killed, judged = fates.count("killed"), len(fates) - fates.count("known")
    return killed / judged if judged else 1.0, killed / len(fates) if fates else 1.0


def is_enough(fates: Sequence[str], of_all: bool) -> bool:
    """Whether both shares are as high as the module says."""
    judged, drawn = shares(fates)
    return judged >= (0.9 if of_all else 0.8) and drawn >= (0.85 if of_all else 0.75)


if __name__ == "__main__":
    sys.exit(main())
