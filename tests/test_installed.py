"""What users get: the tests run on the installed package, and the package holds what it should."""

import hashlib
import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import leasekit

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
INSTALLED = importlib.metadata.distribution("leasekit")
IS_EDITABLE = json.loads(INSTALLED.read_text("direct_url.json") or "{}").get("dir_info", {}).get("editable", False)


def build(target: str, source: Path, into: Path) -> Path:
    """What `python -m build` makes, by the backend that pyproject.toml names and without another environment."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(into)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (built,) = into.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}


def installed(name: str) -> Path:
    """Where this file of the package is imported from."""
    package, _, inner = name.partition("/")
    spec = importlib.util.find_spec(package)
    assert spec
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)), inner)


def test_the_tests_run_on_the_installed_package() -> None:
    home = ROOT if IS_EDITABLE else Path(str(INSTALLED.locate_file("")))
    assert Path(leasekit.__file__).resolve().parents[1] == home.resolve(), (
        "run `make test`, or `pytest`: not `python -m`"
    )


def test_the_installed_package_is_that_of_the_checkout(wheel: Path) -> None:
    stale = [name for name, data in contents(wheel).items() if installed(name).read_bytes() != data]
    assert not stale, "installed before the last change: run `make test`"


def test_the_version_is_that_of_the_metadata() -> None:
    assert INSTALLED.version == PROJECT["version"]


def test_every_entry_point_resolves() -> None:
    entries = {(entry.group, entry.name): entry for entry in INSTALLED.entry_points}
    declared = {("console_scripts", name) for name in PROJECT["scripts"]}
    declared |= {(group, name) for group, names in PROJECT["entry-points"].items() for name in names}
    assert set(entries) == declared
    loaded = {entry: entry.load() for entry in entries.values()}
    assert [entry for entry, value in loaded.items() if not (callable(value) or entry.group == "pytest11")] == []


def test_the_wheel_holds_the_library_and_its_adapters_typed_and_nothing_else(wheel: Path) -> None:
    names = contents(wheel)
    packages = {name.partition("/")[0] for name in names}
    assert packages == {"leasekit"} | {path.name for path in (ROOT / "adapters").iterdir() if path.is_dir()}
    assert {f"{package}/py.typed" for package in packages} <= set(names)


def test_every_link_of_the_readme_on_a_package_index_is_absolute_and_leads_to_a_file(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA"))
    links = re.findall(r"\]\(([^)\s]+)", metadata)
    files = PROJECT["urls"]["Source"] + "/blob/main/"
    ours = [link.removeprefix(files).partition("#")[0] for link in links if link.startswith(files)]
    assert "docs/index.md" in ours
    assert [link for link in links if not link.startswith("https://")] == []
    assert [name for name in ours if not (ROOT / name).exists()] == []


@pytest.mark.slow
def test_a_wheel_is_the_same_whether_built_from_the_checkout_or_from_the_sdist(wheel: Path, tmp_path: Path) -> None:
    sdist = build("sdist", ROOT, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path)  # noqa: S202 - our own archive; early 3.11s know no filter
    again = build("wheel", tmp_path / sdist.name.removesuffix(".tar.gz"), tmp_path / "wheel")
    assert hashlib.sha256(again.read_bytes()).digest() == hashlib.sha256(wheel.read_bytes()).digest()
