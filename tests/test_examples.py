"""Every example runs as it is, in an empty folder, to a good end; the package among them, once it is installed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "examples" / "05_own_adapter"
ELSEWHERE = {"10_sqs_loop.py", "11_swf_poller.py", "12_sfn_activity.py"}  # they need a service: their adapters' tests
EXAMPLES = sorted(
    path for path in (Path(__file__).parents[1] / "examples").glob("[0-9][0-9]_*.py") if path.name not in ELSEWHERE
)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs(example: Path, tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, str(example)],
        check=False,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of somebody who has installed the package: built from its folder, with its entry point."""
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index", "--no-deps"]
    run(*pip, "--no-build-isolation", "--target", target, PACKAGE, cwd=target)
    return os.environ | {"PYTHONPATH": str(target)}


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    ran = subprocess.run(command, check=False, cwd=cwd, env=env, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_the_package_is_found_by_its_scheme(installed: dict[str, str], tmp_path: Path) -> None:
    put = "import leasekit_table; leasekit_table.put('jobs.db', 'job-1', 'report', {'month': 1})"
    run(sys.executable, "-c", put, cwd=tmp_path, env=installed)
    assert run(sys.executable, PACKAGE / "use.py", cwd=tmp_path, env=installed) == "report {'month': 1}\n"


@pytest.mark.slow
def test_the_package_passes_the_contract(installed: dict[str, str], tmp_path: Path) -> None:
    pytest_alone: list[str | Path] = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        tmp_path,
    ]
    assert " passed" in run(*pytest_alone, PACKAGE / "tests", cwd=tmp_path, env=installed)


def test_the_page_on_adapters_shows_the_package() -> None:
    page = (PACKAGE.parents[1] / "docs" / "adapters.md").read_text(encoding="utf-8")
    shown = dict(re.findall(r'^```python title="([\w.]+)"\n(.*?)^```$', page, re.M | re.S))
    for name in ("leasekit_table.py", "tests/test_table.py", "tests/conftest.py"):
        assert shown[Path(name).name] == (PACKAGE / name).read_text(encoding="utf-8")
