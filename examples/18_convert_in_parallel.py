"""A flow with branches: fetch an album, convert its pages in parallel, publish them together.

python examples/18_convert_in_parallel.py
"""

import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from msgspec import Struct

import leasekit


class Album(Struct, frozen=True):
    """The state of the flow."""

    folder: str
    pages: list[str] = []
    published: str | None = None


flow = leasekit.Flow("publish-album", state=Album)


@flow.step(on_success="convert")
def fetch(album: Album) -> Album:
    return Album(album.folder, sorted(str(path) for path in Path(album.folder).glob("*.txt")))


@flow.step(each=lambda album: album.pages, on_success="publish", on_failure="give_up")
def convert(page: str) -> str:
    time.sleep(0.1)  # hard work
    converted = Path(page).with_suffix(".upper")
    converted.write_text(Path(page).read_text(encoding="utf-8").upper(), encoding="utf-8")
    return str(converted)


@flow.step()
def publish(album: Album, step: leasekit.Step) -> Album:
    published = Path(album.folder) / "album"
    published.write_text("".join(Path(page).read_text(encoding="utf-8") for page in step.results), encoding="utf-8")
    return Album(album.folder, album.pages, str(published))


@flow.step()
def give_up(album: Album, step: leasekit.Step) -> None:
    assert step.failure is not None
    print(f"not published: {step.failure.error['message']}")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, leasekit.connect(f"sqlite:///{folder}/tasks.db") as client:
        for number in range(8):
            Path(folder, f"{number}.txt").write_text(f"page {number}\n", encoding="utf-8")
        worker = leasekit.Worker(client)
        worker.add(flow)
        at_work = threading.Thread(target=worker.run)
        at_work.start()
        try:
            state = result(client, flow.start(client, Album(folder)).id)
        finally:
            worker.stop()
            at_work.join()
        text = Path(state["published"]).read_text(encoding="utf-8")
        print(text, end="")
        assert text == "".join(f"PAGE {number}\n" for number in range(8))


def result(client: leasekit.Client, flow_id: str) -> dict[str, Any]:
    """Return the last state of a flow, once it has ended."""
    while True:
        info = client.flow(flow_id)
        assert info is not None
        if info.status != "running":
            assert info.status == "succeeded", info
            state: dict[str, Any] = info.state
            return state
        time.sleep(0.05)


if __name__ == "__main__":
    main()
