"""`make` with a Python that leasekit cannot run on says so before it installs anything."""

import hashlib
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
VERSIONS = ["3.10.14", "3.11.0", "3.11.9", "3.12.0", "3.12.1", "3.12.2", "3.12.3", "3.13.0", "3.14.0"]


def python(folder: Path, version: str) -> Path:
    """An interpreter that takes itself for this version, and makes no environment."""
    info = (*map(int, version.split(".")), "final", 0)
    made = folder / f"python{version}"
    made.write_text(
        "#!/bin/sh\n"
        'test "$1" = -c || { echo "would go on"; exit 3; }\n'
        f"exec {sys.executable} -c \"import sys; sys.version_info = {info}; exec(sys.argv[1])\" \"$2\"\n"
    )  # fmt: skip
    made.chmod(0o755)
    return made


@pytest.mark.parametrize("version", VERSIONS)
def test_make_takes_the_pythons_that_the_package_takes(tmp_path: Path, version: str) -> None:
    environment = tmp_path / "environment"
    command = [
        "make",
        "--no-print-directory",
        f"PYTHON={python(tmp_path, version)}",
        f"VENV={environment}",
        str(environment / "python"),
    ]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if version in SpecifierSet(PROJECT["requires-python"]):
        assert "would go on" in ran.stdout
    else:
        assert ran.returncode != 0
        assert "would go on" not in ran.stdout
        assert f"not {version}" in ran.stderr
        assert "3.12.0 to 3.12.2" in ran.stderr


def test_the_pythons_that_are_not_tested_are_named(tmp_path: Path) -> None:
    refused = python(tmp_path, "3.12.1")
    command = [
        "make",
        "--no-print-directory",
        "pythons",
        f"PYTHONS=python3.99 {refused}",
        f"VENV={tmp_path / 'environment'}",
    ]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.stdout.splitlines() == [
        "SKIPPED python3.99: not in PATH",
        f"SKIPPED {refused}: leasekit does not run on 3.12.1",
        "passed with: none",
    ]
    assert ran.returncode != 0


def test_versions_that_start_no_thread_after_the_main_thread_are_refused() -> None:
    refused = [version for version in VERSIONS if version not in SpecifierSet(PROJECT["requires-python"])]
    assert refused == ["3.10.14", "3.12.0", "3.12.1", "3.12.2"]


def test_the_classifiers_name_every_python_that_is_served() -> None:
    named = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if ":: Python :: 3." in line]
    assert named == ["3.11", "3.12", "3.13", "3.14"]


def test_make_demo_says_what_it_does_before_each_of_its_steps(tmp_path: Path) -> None:
    command = ["make", "--no-print-directory", "--dry-run", "demo", f"VENV={tmp_path / 'environment'}", "ARGS="]
    steps = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    said = [step for step in steps if step.startswith("echo ")]
    assert steps[0] == said[0]
    words = ["Watch", "virtual environment", "requirements/run.txt", "building leasekit"]
    assert [word for line in said[1:] for word in words if word in line] == words
    assert steps[-1].rstrip().endswith("leasekit demo")


def release(folder: Path, environment: str) -> "subprocess.CompletedProcess[str]":
    """`make release` into this folder, with an environment that has its tools already."""
    command = ["make", "--no-print-directory", f"--old-file={environment}/dev", "release"]
    variables = [f"VENV={environment}", f"DIST={folder}"]
    return subprocess.run([*command, *variables], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_release_is_an_sdist_and_a_wheel_with_their_sums_and_the_list_of_their_components(tmp_path: Path) -> None:
    dist = tmp_path / "dist"
    ran = release(dist, sys.prefix)
    assert ran.returncode == 0, ran.stderr
    version = PROJECT["version"]
    built = [f"leasekit-{version}-py3-none-any.whl", f"leasekit-{version}.tar.gz"]
    assert sorted(path.name for path in dist.iterdir()) == sorted([*built, "SHA256SUMS", "sbom.cdx.json"])
    sums = [f"{hashlib.sha256((dist / name).read_bytes()).hexdigest()}  {name}" for name in built]
    assert sorted((dist / "SHA256SUMS").read_text().splitlines()) == sorted(sums)
    listed = json.loads((dist / "sbom.cdx.json").read_text())
    assert listed["bomFormat"] == "CycloneDX"
    assert (listed["metadata"]["component"]["name"], listed["metadata"]["component"]["version"]) == (
        "leasekit",
        version,
    )
    lock = (ROOT / "requirements/run.txt").read_text(encoding="utf-8")
    assert sorted(f"{one['name']}=={one['version']}" for one in listed["components"]) == sorted(
        re.findall(r"^[\w.-]+==[\w.]+", lock, re.MULTILINE)
    )
    assert all(one["externalReferences"][0]["hashes"] for one in listed["components"])


def test_two_builds_that_differ_are_no_release(tmp_path: Path) -> None:
    build = tmp_path / "environment/bin/python"
    build.parent.mkdir(parents=True)
    build.write_text('#!/bin/sh\nmkdir -p "$5"; echo "$5" >"$5/leasekit-1.whl"\n')
    build.chmod(0o755)
    dist = tmp_path / "dist"
    ran = release(dist, str(build.parents[1]))
    assert ran.returncode != 0
    assert "leasekit-1.whl: FAILED" in ran.stdout
    assert not (dist / "sbom.cdx.json").exists()
