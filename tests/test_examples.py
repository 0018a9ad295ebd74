"""Every example runs as it is, in an empty folder, to a good end; the package among them, once it is installed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.postgres_server import PostgresServer

PACKAGE = Path(__file__).parents[1] / "examples" / "05_own_adapter"
FLEET = PACKAGE.parent / "16_atf"
ELSEWHERE = {  # they need a service: the tests of their adapters, and of the check of clients, run them
    "10_sqs_loop.py", "11_swf_poller.py", "12_sfn_activity.py", "15_any_language.py", "19_transaction.py",
}  # fmt: skip
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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_fleet_loses_no_task_though_each_of_its_parts_is_killed(postgres: PostgresServer, tmp_path: Path) -> None:
    store = os.environ | {"LEASEKIT_STORE": postgres.emptied()}
    told = run(sys.executable, FLEET / "fleet.py", cwd=tmp_path, env=store, timeout=500)
    parts = re.findall(r"^(\w+) +killed: 12 tasks, (\d+) runs", told, re.M)
    assert [part for part, _ in parts] == ["queues", "frontend", "hsc", "consumer", "host", "controller", "executor"]
    assert int(dict(parts)["host"]) > 12, "the task that ran when its host was killed has run again"


@pytest.mark.slow
def test_a_task_comes_with_the_transaction_of_an_application(postgres: PostgresServer, tmp_path: Path) -> None:
    store = os.environ | {"LEASEKIT_STORE": postgres.emptied()}
    assert "confirmed: order 2" in run(sys.executable, PACKAGE.parent / "19_transaction.py", cwd=tmp_path, env=store)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of somebody who has installed the package: built from its folder, with its entry point."""
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index", "--no-deps"]
    run(*pip, "--no-build-isolation", "--target", target, PACKAGE, cwd=target)
    return os.environ | {"PYTHONPATH": str(target)}


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None, timeout: float = 100) -> str:
    ran = subprocess.run(command, check=False, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)
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
