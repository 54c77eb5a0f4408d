"""Mutation test: a seeded sample of small faults in the code, each held against the quick tests of the files that import the mutated one.

A fault is killed where a test fails or hangs. Ends with 1 where less than 90 % of all, or 80 % of a group, are killed. Those that may
survive are in mutants.toml with a reason, and are not drawn.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from queue import SimpleQueue

from faults import Mutant, mutants

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = tomllib.loads((ROOT / "tools" / "mutants.toml").read_text(encoding="utf-8"))
LIMIT = 90.0  # seconds of tests a fault, the nearest first
TEST_LIMIT = 40  # seconds of one test
PYTEST = ("-m", "pytest", "-qx", "-m", "not slow and not engine", "--timeout", str(TEST_LIMIT), "-p", "no:cacheprovider")
NOTHING_RAN = 5


def sample(groups: list[str], seed: int, count: int) -> list[Mutant]:
    """As many of each group, none of them known."""
    chance, known, chosen = random.Random(seed), {(row["file"], row["was"], row["now"]) for row in SETTINGS.get("known", ())}, []
    for group in groups:
        paths = [path for pattern in SETTINGS["groups"][group] for path in sorted(ROOT.glob(pattern))]
        files = [each for path in paths for each in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
        every = [mutant for path in files for mutant in mutants(group, path, ROOT) if (mutant.file, mutant.was, mutant.now) not in known]
        chosen += chance.sample(every, min(len(every), count // len(groups)))
    return chance.sample(chosen, len(chosen))


def dotted(path: Path) -> str:
    """The module's name."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def imports(path: Path) -> frozenset[str]:
    """Modules that a file imports, and the names that it takes from them."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = path.relative_to(ROOT).parts[: -node.level] if node.level else ()
            base = ".".join((*package, *filter(None, [node.module])))
            found |= {base, *(f"{base}.{each.name}" for each in node.names)}
    return frozenset(found)


@cache
def tests_of(file: str) -> tuple[str, ...]:
    """Test files that import it, then those that import what imports it, and so on for three steps."""
    code = [path for folder in ("policies", "queueing", "server", "loadgen", "kendall", "tests") for path in (ROOT / folder).rglob("*.py")]
    reached, found = {dotted(ROOT / file)}, dict[str, None]()
    for _ in range(3):
        near = [path for path in code if imports(path) & reached]
        found |= dict.fromkeys(str(path.relative_to(ROOT)) for path in sorted(near) if path.name.startswith("test_"))
        reached |= {dotted(path) for path in near}
    return tuple(found)


def killed(mutant: Mutant, place: Path) -> bool:
    """Whether a test fails in a copy of the tree that has the fault."""
    target, ends_at = place / mutant.file, time.monotonic() + LIMIT
    environment = os.environ | {"PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1", "NUMBA_CACHE_DIR": str(place / ".numba")}
    before = target.read_text(encoding="utf-8")
    target.write_text(mutant.text, encoding="utf-8")
    try:
        for test in tests_of(mutant.file):
            left = max(ends_at - time.monotonic(), 0.1)
            ended = subprocess.run(
                [sys.executable, *PYTEST, test], cwd=place, env=environment, capture_output=True, timeout=left, check=False
            )
            if ended.returncode not in (0, NOTHING_RAN):
                return True
    except subprocess.TimeoutExpired:
        pass  # the tests are slower than the limit; none had failed
    finally:
        target.write_text(before, encoding="utf-8")
    return False


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("--seed", 1), ("--count", 200), ("--workers", 2)):
        parser.add_argument(name, type=int, default=value)
    parser.add_argument("--group", choices=SETTINGS["groups"])
    options = parser.parse_args()
    groups = [options.group] if options.group else list(SETTINGS["groups"])
    chosen, places = sample(groups, options.seed, options.count), SimpleQueue[Path]()
    results: dict[str, list[bool]] = {group: [] for group in groups}

    def judge(mutant: Mutant) -> None:
        place = places.get()
        results[mutant.group].append(dead := killed(mutant, place))
        places.put(place)
        done, fate = sum(map(len, results.values())), "killed" if dead else "SURVIVED"
        print(f"{done:3d}/{len(chosen)} {fate:8s} {mutant.file}:{mutant.line}  {mutant.was}  ->  {mutant.now}", flush=True)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.workers) as pool:
        for number in range(options.workers):
            places.put(Path(shutil.copytree(ROOT, Path(folder) / str(number), ignore=shutil.ignore_patterns(".*", "__pycache__", "runs"))))
        list(pool.map(judge, chosen))
    results["all"] = [dead for each in results.values() for dead in each]
    for group, dead in results.items():
        print(f"{group:30s} {sum(dead)} of {len(dead)} killed, {100 * sum(dead) / len(dead):.0f} %")
    return 0 if all(sum(dead) >= (0.9 if group == "all" else 0.8) * len(dead) for group, dead in results.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
