"""A worker: handlers by kind, payloads checked against their annotations, and a stop without lost tasks.

`worker.run()` goes on until SIGTERM or Ctrl-C; here the worker stops itself when all tasks have ended.
"""

import asyncio
import threading
import time

import msgspec

import leasekit

client = leasekit.connect("sqlite:///tasks.db")
worker = leasekit.Worker(client, concurrency=4)


class Image(msgspec.Struct):
    path: str
    width: int = 100


@worker.handler("thumbnail")  # a plain function runs in a thread
def thumbnail(image: Image, held: leasekit.Lease) -> str:
    held.check()
    time.sleep(0.1)
    return f"{image.path} at {image.width}"


@worker.handler("notify")  # a coroutine runs in an event loop
async def notify(address: str) -> None:
    await asyncio.sleep(0.1)


for i in range(5):
    client.schedule("thumbnail", {"path": f"{i}.png"}, id=f"thumbnail-{i}")
client.schedule("thumbnail", {"width": "wide"}, id="misfit")  # not an Image: a fatal failure that says where
client.schedule("notify", "ada@example.org", id="notify")


def stop_when_done() -> None:
    ids = [*(f"thumbnail-{i}" for i in range(5)), "misfit", "notify"]
    while not all((info := client.get(task_id)) and info.status.ended for task_id in ids):
        time.sleep(0.1)
    for task_id in ids:
        info = client.get(task_id)
        assert info is not None
        print(task_id, info.status, info.result or info.error)
    worker.stop()


threading.Thread(target=stop_when_done).start()
worker.run()
client.close()
