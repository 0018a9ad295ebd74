"""URL scheme → backend, through entry points; what is missing is answered with what to do."""

import importlib
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
from packaging.requirements import Requirement

from leasekit import registry
from leasekit.backend import Backend
from leasekit.errors import ConfigError, LeasekitError, MissingDependency, UnknownScheme
from leasekit.registry import GROUP, open_backend, register, schemes
from tests.sampling import slow_after

ROOT = Path(__file__).parents[1]
Install = Callable[..., None]


class Opened(NamedTuple):
    """What a backend of these tests was opened with."""

    url: str
    worker: str


def opened(url: str, *, worker: str) -> Opened:
    return Opened(*cast("tuple[str, str]", open_backend(url, worker=worker)))


BACKEND = """
def connect(url, *, worker):
    return url, worker
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """install("scheme", "module", source): exactly these backends are installed, as their own packages would be."""
    entries: list[EntryPoint] = []

    def found(*, group: str) -> EntryPoints:
        return EntryPoints(entries).select(group=group)

    monkeypatch.setattr("importlib.metadata.entry_points", found)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    importlib.invalidate_caches()

    def add(scheme: str, module: str = "", source: str = BACKEND, *, group: str = GROUP) -> None:
        module = module or f"backend_of_{scheme}".replace("-", "_")
        (tmp_path / f"{module}.py").write_text(source, encoding="utf-8")
        entries.append(EntryPoint(scheme, f"{module}:connect", group))

    return add


def test_the_backend_of_a_scheme_is_given_the_url_and_the_workers_name(install: Install) -> None:
    install("registry-one")
    assert opened("registry-one://host/x?y=1", worker="w") == Opened("registry-one://host/x?y=1", "w")


TAKES = {
    "no": "def connect(url, *, worker): return url, worker",
    "one": "def connect(url, *, worker, color=None): return url, color",
    "any": "def connect(url, *, worker, **options): return url, options['color']",
}


@pytest.mark.parametrize("takes", ["one", "any"])
def test_options_are_passed_to_the_backend_as_keyword_arguments(takes: str, install: Install) -> None:
    install(f"options-{takes}", source=TAKES[takes])
    found: Any = open_backend(f"options-{takes}://", worker="w", options={"color": "red"})
    assert found == (f"options-{takes}://", "red")


def test_an_option_that_a_backend_does_not_know_is_named_with_the_scheme(install: Install) -> None:
    install("options-no", source=TAKES["no"])
    install("options-one", source=TAKES["one"])
    for options, why in (({"color": 1}, "it has no options"), ({"worker": "w"}, "it has no options")):
        with pytest.raises(ConfigError, match=f"options-no:// knows no option '{next(iter(options))}': {why}"):
            open_backend("options-no://", worker="w", options=options)
    with pytest.raises(ConfigError, match="options-one:// knows no option 'url': its options are color"):
        open_backend("options-one://", worker="w", options={"url": "x"})
    assert opened("options-no://", worker="w") == Opened("options-no://", "w")


def test_a_registered_backend_without_options_is_called_without_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})

    def make(url: str, worker: str) -> Backend:
        return cast("Backend", (url, worker))

    register("options-registered", make)
    assert opened("options-registered://", worker="w") == Opened("options-registered://", "w")
    with pytest.raises(ConfigError, match="options-registered:// knows no option 'ca'"):
        open_backend("options-registered://", worker="w", options={"ca": "x"})


def test_the_case_of_a_scheme_does_not_matter(install: Install) -> None:
    install("registry-two")
    assert opened("Registry-TWO://Host", worker="w") == Opened("Registry-TWO://Host", "w")


def test_the_schemes_are_those_of_the_group_sorted_and_each_once(install: Install) -> None:
    install("b")
    install("a")
    install("a")
    install("c", group="somebody.elses")
    assert schemes() == ["a", "b"]


def test_an_unknown_scheme_lists_what_is_installed(install: Install) -> None:
    install("b")
    install("a")
    with pytest.raises(UnknownScheme, match=r"no backend answers to 'ftp://': installed are a, b$"):
        open_backend("ftp://host", worker="w")


def test_a_url_of_sqlalchemy_is_refused_with_the_one_to_write(install: Install) -> None:
    install("a")
    with pytest.raises(UnknownScheme, match=r"installed are a; write postgresql://$"):
        open_backend("postgresql+psycopg://host/db", worker="w")


@pytest.mark.parametrize("url", ["", "host:8077/x y", "//host", "tasks.db"])
def test_a_url_without_a_scheme_is_refused_and_lists_what_is_installed(install: Install, url: str) -> None:
    install("a")
    with pytest.raises(UnknownScheme, match=r"write it as in http://.*: installed are a$"):
        open_backend(url, worker="w")


def test_a_path_without_a_scheme_is_refused_with_the_url_of_the_file(install: Install) -> None:
    install("a")
    with pytest.raises(UnknownScheme, match=r"\(write it as in sqlite:////srv/x\.db\): installed are a$"):
        open_backend("/srv/x.db", worker="w")


def test_a_refusal_does_not_repeat_the_password_of_a_url(install: Install) -> None:
    install("a")
    with pytest.raises(UnknownScheme) as refused:
        open_backend("ftp://me:hunter2@host", worker="w")
    assert "hunter2" not in str(refused.value)


def test_an_unknown_scheme_is_a_value_error_of_leasekit() -> None:
    assert issubclass(UnknownScheme, ValueError)
    assert issubclass(UnknownScheme, LeasekitError)


def test_a_strangers_backend_whose_library_is_missing_says_which(install: Install) -> None:
    install("registry-three", source="import a_library_nobody_has.part\n")
    with pytest.raises(MissingDependency) as missing:
        open_backend("registry-three://host", worker="w")
    assert str(missing.value) == (
        "backend 'registry-three' needs 'a_library_nobody_has': install what backend_of_registry_three requires"
    )
    assert isinstance(missing.value.__cause__, ModuleNotFoundError)


@pytest.mark.parametrize(
    ("use", "library", "extra"),
    slow_after(
        5,
        [
            ("import leasekit_celery", "celery", "celery"),
            ("import leasekit.telemetry", "opentelemetry", "otel"),
            ("leasekit.connect('redis://host')", "redis", "redis"),
            ("leasekit.connect('sqlite:///tasks.db')", "sqlalchemy", "server"),
            ("leasekit.connect('sqs://q?region=r')", "boto3", "sqs"),
            ("import leasekit_dramatiq", "dramatiq", "dramatiq"),
            ("import leasekit_sfn", "boto3", "sfn"),
            ("import leasekit_sqs", "boto3", "sqs"),
            ("import leasekit_swf", "boto3", "swf"),
            ("leasekit.connect('http://host')", "httpx", "http"),
            ("leasekit.connect('sfn://a/b')", "boto3", "sfn"),
            ("leasekit.connect('sqlite:///tasks.db')", "alembic", "server"),
            ("leasekit.connect('sqlite:///tasks.db')", "starlette", "server"),
            ("leasekit.connect('swf://a/b')", "boto3", "swf"),
        ],
    ),
)
def test_without_a_library_the_extra_that_installs_it_is_named(use: str, library: str, extra: str) -> None:
    program = f"""\
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {library!r}:
            raise ModuleNotFoundError(name=name)
sys.meta_path.insert(0, Hidden())
import leasekit
try:
    {use}
except leasekit.MissingDependency as missing:
    print(missing)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    how = f": install the extra {extra} of leasekit, for example pip install '/path/to/leasekit[{extra}]'\n"
    assert ran.stdout.endswith(how)
    assert library in ran.stdout


def test_every_extra_is_part_of_all() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    (whole,) = map(Requirement, extras["all"])
    server = next(Requirement(line) for line in extras["server"] if line.startswith("leasekit["))
    assert whole.extras | server.extras == extras.keys() - {"all"}


def test_a_backend_that_is_not_there_itself_is_no_missing_library(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = EntryPoint("gone", "a_backend_that_was_deleted:connect", GROUP)

    def found(*, group: str) -> EntryPoints:
        return EntryPoints([entry]).select(group=group)

    monkeypatch.setattr("importlib.metadata.entry_points", found)
    with pytest.raises(ModuleNotFoundError) as missing:
        open_backend("gone://host", worker="w")
    assert not isinstance(missing.value, MissingDependency)


def test_another_error_of_a_backend_is_not_hidden(install: Install) -> None:
    install("registry-four", source="raise RuntimeError('broken')\n")
    with pytest.raises(RuntimeError, match="broken"):
        open_backend("registry-four://host", worker="w")


def test_leasekits_own_backends_are_installed() -> None:
    assert {"http", "https", "memory", "sqlite"} <= set(schemes())


def test_two_packages_with_one_scheme_are_both_named(install: Install) -> None:
    install("twice", "backend_by_one")
    install("twice", "backend_by_another")
    with pytest.raises(ConfigError, match="answered by backend_by_another:connect and backend_by_one:connect"):
        open_backend("twice://host", worker="w")


def test_what_is_registered_goes_before_what_is_installed(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    install("b", source="raise RuntimeError('loaded')\n")
    register("a", lambda url, *, worker: (url, worker))  # type: ignore[arg-type, return-value]
    register("b", lambda url, *, worker: (url, "by hand"))  # type: ignore[arg-type, return-value]
    assert opened("A://host", worker="w") == Opened("A://host", "w")
    assert opened("b://host", worker="w") == Opened("b://host", "by hand")
    assert schemes() == ["a", "b"]


@pytest.mark.parametrize("scheme", ["", "A", "my_scheme", "1a", "a://"])
def test_what_is_no_scheme_cannot_be_registered(scheme: str) -> None:
    with pytest.raises(ConfigError, match="scheme must be"):
        register(scheme, lambda url, *, worker: None)  # type: ignore[arg-type, return-value]
