"""The page's vendored files are those that their manifest names."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kendall.server.page.assets import load_assets
from tools import vendor


@pytest.mark.parametrize("folder", vendor.FOLDERS, ids=lambda folder: folder.parent.name)
def test_every_file_has_the_sum_of_the_manifest_and_a_licence(folder: Path) -> None:
    assert list(vendor.differences(folder)) == []
    for package in vendor.manifest(folder):
        licence = next(name for name in package["files"] if name.startswith("LICENSE"))
        assert (folder / licence).read_text(encoding="utf-8").strip()
        assert package["version"]


def test_the_accessibility_rules_are_not_part_of_the_page() -> None:
    assert not [name for name in load_assets().files if "axe" in name]


def test_a_changed_a_missing_and_a_foreign_file_are_found(tmp_path: Path) -> None:
    folder = tmp_path / "vendor"
    shutil.copytree(vendor.FOLDER, folder)
    (folder / "uplot.min.css").write_text("changed")
    (folder / "inter-latin.woff2").unlink()
    (folder / "extra.js").write_text("")
    found = list(vendor.differences(folder))
    assert [line.partition(":")[0] for line in found] == [
        "uplot.min.css",
        "inter-latin.woff2",
        "extra.js",
    ]


def test_the_library_says_the_version_of_the_manifest() -> None:
    (uplot,) = (package for package in vendor.manifest() if package["package"] == "uplot")
    head = (vendor.FOLDER / "uplot.iife.min.js").read_text(encoding="utf-8")[:200]
    assert f"v{uplot['version']}" in head
