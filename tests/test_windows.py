"""Windows is refused in one sentence, and not by whatever is missing there first."""

import subprocess
import sys

import pytest

# Libraries are imported before: they know Windows, but not without its modules of the standard library.
AS_ON_WINDOWS = """
import asyncio, importlib.metadata, os, signal, sys, time
import anyio, httpx, msgspec, typer

for module, names in {
    os: ("fork", "register_at_fork"),
    signal: ("pthread_sigmask",),
    time: ("CLOCK_BOOTTIME", "CLOCK_MONOTONIC", "clock_gettime"),
}.items():
    for name in names:
        if hasattr(module, name):  # CLOCK_BOOTTIME is missing outside of Linux
            delattr(module, name)
sys.modules["fcntl"] = None
sys.platform = "win32"
"""


@pytest.mark.parametrize("module", ["leasekit", "leasekit_http", "leasekit.cli.app"])
def test_an_import_on_windows_is_refused_with_a_reason(module: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", f"{AS_ON_WINDOWS}\nimport {module}"], check=False, capture_output=True, text=True
    )
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1].startswith("ImportError: leasekit does not run on Windows")
