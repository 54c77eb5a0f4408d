"""The vendored npm packages of the live page and of its tests: compare the files with their
manifests, or fetch them again.

    python3 tools/vendor.py          exit status 1 unless the files are those of the manifests
    python3 tools/vendor.py --fetch  `npm pack` each package, check its integrity, extract the
                                     files, check each

Standard library only; `--fetch` needs npm.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "server/page/static/vendor"
FOLDERS = (FOLDER, ROOT / "tests/page/vendor")
MANIFEST = "manifest.json"
OURS = {MANIFEST, "README.md"}


def main() -> int:
    """Exit status 1 where something is not as the manifest says."""
    parser = argparse.ArgumentParser(
        description="The vendored npm packages of the live page and of its tests."
    )
    parser.add_argument(
        "--fetch", action="store_true", help="fetch the files again from their packages"
    )
    if parser.parse_args().fetch:
        for folder in FOLDERS:
            for package in manifest(folder):
                fetch(package, folder)
    wrong = [
        f"{folder.relative_to(ROOT)}/{line}" for folder in FOLDERS for line in differences(folder)
    ]
    for line in wrong:
        print(f"vendor: {line}", file=sys.stderr)
    return 1 if wrong else 0


def manifest(folder: Path = FOLDER) -> list[dict[str, Any]]:
    """One entry a package."""
    found: list[dict[str, Any]] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    return found


def differences(folder: Path = FOLDER) -> Iterator[str]:
    """What is missing, changed or not in the manifest."""
    known = {
        name: file["sha256"]
        for package in manifest(folder)
        for name, file in package["files"].items()
    }
    for name, expected in known.items():
        path = folder / name
        found = hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else "no such file"
        if found != expected:
            yield f"{name}: got {found}; expected {expected}"
    for path in folder.iterdir():
        if path.name not in known and path.name not in OURS:
            yield f"{path.name}: not in {MANIFEST}"


def fetch(package: dict[str, Any], folder: Path = FOLDER) -> None:
    """Its files, taken from the package of exactly that content. Exits where it is another."""
    with tempfile.TemporaryDirectory() as temporary:
        asked = f"{package['package']}@{package['version']}"
        packed = subprocess.run(
            ["npm", "pack", "--silent", asked],
            cwd=temporary,
            capture_output=True,
            text=True,
            check=True,
        )
        archive = Path(temporary) / packed.stdout.split()[-1]
        found = "sha512-" + base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
        if found != package["integrity"]:
            sys.exit(f"vendor: {asked}: got {found}; expected {package['integrity']}")
        with tarfile.open(archive) as files:
            for name, file in package["files"].items():
                member = files.extractfile(f"package/{file['from']}")
                assert member is not None
                (folder / name).write_bytes(member.read())


if __name__ == "__main__":
    sys.exit(main())
