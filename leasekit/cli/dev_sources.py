"""Sources: the .py files below a directory, and which of them have changed, by times and sizes."""

import os
from collections.abc import Iterator
from pathlib import Path

_NOT_CODE = {"__pycache__", "node_modules"}


class Sources:
    """The .py files below a directory, without hidden directories and virtual environments."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._seen = dict(_stamps(root))

    def __len__(self) -> int:
        return len(self._seen)

    def changed(self) -> list[str]:
        """Return the files changed, added or removed since the last call, sorted, relative to the directory."""
        now = dict(_stamps(self._root))
        both = self._seen.items() ^ now.items()
        self._seen = now
        return sorted({os.path.relpath(path, self._root) for path, _ in both})


def _stamps(directory: Path | str) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield each file's path, and its time and size, which change when the file is written."""
    try:
        entries = list(os.scandir(directory))
    except OSError:  # removed meanwhile, or not readable
        return
    if any(entry.name == "pyvenv.cfg" for entry in entries):
        return
    for entry in entries:
        if entry.name.startswith(".") or entry.name in _NOT_CODE:
            continue
        try:
            if entry.is_dir(follow_symlinks=False):
                yield from _stamps(entry.path)
            elif entry.name.endswith(".py"):
                stat = entry.stat()
                yield entry.path, (stat.st_mtime_ns, stat.st_size)
        except OSError:  # a broken link, as editors make for locks
            continue
