"""FastAPI: background work that survives its process, with leases instead of BackgroundTasks.

    pip install fastapi httpx && python examples/09_fastapi.py

`BackgroundTasks` die with the process. Here a request schedules durable work and returns at once. A worker inside the
application runs the work (`worker.serve()` is a coroutine), and so does any other process of the application.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import httpx
from fastapi import FastAPI

import leasekit

client = leasekit.connect("sqlite:///reports.db")
worker = leasekit.Worker(client)


@worker.handler("report")
async def report(payload: dict[str, str]) -> str:
    await asyncio.sleep(0.05)
    return f"report for {payload['customer']}"


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
    async with client, anyio.create_task_group() as group:
        group.start_soon(worker.serve)
        yield
        worker.stop()  # handlers end and results are reported before the application ends


app = FastAPI(lifespan=lifespan)


@app.post("/reports/{customer}", status_code=202)
async def order(customer: str) -> dict[str, str]:
    task = await client.aschedule("report", {"customer": customer})
    return {"id": task.id}


@app.get("/reports/{task_id}")
async def look(task_id: str) -> dict[str, str | None]:
    info = await client.aget(task_id)
    return {"status": info.status if info else "unknown", "result": info.result if info else None}


async def main() -> None:
    transport = httpx.ASGITransport(app)
    async with lifespan(app), httpx.AsyncClient(transport=transport, base_url="http://app") as browser:
        ordered = (await browser.post("/reports/ada")).json()["id"]
        await client.await_tasks(ordered, timeout=30)
        answer = (await browser.get(f"/reports/{ordered}")).json()
        print(answer)
        assert answer == {"status": "success", "result": "report for ada"}


if __name__ == "__main__":
    asyncio.run(main())
