"""Leases in an event loop (asyncio or trio): several at a time; a block is cancelled if its lease is lost."""

import sys

import anyio

import leasekit


async def run(lease: leasekit.Lease) -> None:
    async with lease as held:
        await anyio.sleep(0.1)
        held.complete({"hello": held.task.payload})


async def main() -> None:
    async with leasekit.connect("sqlite:///tasks.db") as client:
        for name in ("Ada", "Grace", "Barbara"):
            await client.aschedule("greeting", name, id=f"greeting-{name}")

        async with anyio.create_task_group() as group:
            async for task in client.tasks("greeting", until_idle=0.5):
                # The lease is made here: the loop releases a task without one when it asks for the next.
                group.start_soon(run, leasekit.lease(task))

        for name in ("Ada", "Grace", "Barbara"):
            info = await client.aget(f"greeting-{name}")
            assert info is not None
            print(info.id, info.status, info.result)


anyio.run(main, backend="trio" if "trio" in sys.argv else "asyncio")
