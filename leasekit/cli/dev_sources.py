"""Which .py files there are below a directory, and which have changed: by their times and sizes, without a library."""

import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Sources"]

_NOT_CODE = {"__pycache__", "node_modules"}


class Sources:
    """The .py files below a directory, but for hidden directories and virtual environments."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._seen = dict(_stamps(root))

    def __len__(self) -> int:
        return len(self._seen)

    def changed(self) -> list[str]:
        """The files that were changed, added or removed since the last call, sorted, relative to the directory."""
        now = dict(_stamps(self._root))
        both = self._seen.items() ^ now.items()
        self._seen = now
        return sorted({os.path.relpath(path, self._root) for path, _ in both})


def _stamps(directory: Path | str) -> Iterator[tuple[str, tuple[int, int]]]:
    """Each file's path, and what changes when it is written."""
    try:
        entries = list(os.scandir(directory))
    except OSError:  # removed while we looked, or not ours to read
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
        except OSError:  # a link to nothing, as editors make for locks
            continue
