"""A sync that fails, for real: the kernel answers EIO, by a seccomp filter, which needs no privilege.

A filter cannot be taken back. So it fails what is synced through low file descriptors; to heal is to have none of
those left. A connection that is used on keeps its own, and would never get through again.
"""

import subprocess
import sys
from pathlib import Path

SICK = """
import ctypes, os, platform, struct, sys
from pathlib import Path
from leasekit.errors import Unavailable
from leasekit.server.store import Dedupe
from leasekit.server.store.sqlite.store import SqliteStore

LOW = 200
FSYNC, FDATASYNC = {"x86_64": (74, 75), "aarch64": (82, 83)}[platform.machine()]

def op(code, jump_if, jump_else, value):
    return struct.pack("HBBI", code, jump_if, jump_else, value)

FILTER = b"".join([
    op(0x20, 0, 0, 0),              # the number of the system call
    op(0x15, 1, 0, FSYNC),          # one of the two?
    op(0x15, 0, 3, FDATASYNC),
    op(0x20, 0, 0, 16),             # its first argument, the file descriptor
    op(0x35, 1, 0, LOW),            # not a low one?
    op(0x06, 0, 0, 0x00050000 | 5), # EIO
    op(0x06, 0, 0, 0x7FFF0000),     # as ever
])

def fall_ill():
    libc = ctypes.CDLL(None, use_errno=True)
    program = ctypes.create_string_buffer(FILTER, len(FILTER))
    header = struct.pack("HxxxxxxP", len(FILTER) // 8, ctypes.addressof(program))
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, header, 0, 0) == 0, os.strerror(ctypes.get_errno())  # PR_SET_SECCOMP, by a filter

def put(key):
    with store.transaction() as tx:
        tx.set_dedupes([Dedupe("k", key, "id", None)])

def there(*keys):
    with store.transaction() as tx:
        return sorted(key for _, key in tx.dedupes([("k", key) for key in keys]))

store = SqliteStore(Path(sys.argv[1]))
store.open()
put("before")
fall_ill()
for _ in range(2):
    try:
        put("meanwhile")
    except Unavailable as error:
        print(error)
while os.dup(0) < LOW:
    pass
print(there("before", "meanwhile"))
put("after")
store.close()
while os.dup(0) < LOW:
    pass
store.open()
print(there("before", "meanwhile", "after"))
store.close()
"""


def test_nothing_is_acknowledged_and_the_next_connection_gets_through(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SICK, str(tmp_path / "tasks.db")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "the store failed: disk I/O error",
        "the store failed: disk I/O error",
        "['before']",
        "['after', 'before']",
    ]
