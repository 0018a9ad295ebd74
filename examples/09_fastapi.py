"""Background work of a web application that survives its process: FastAPI, with leases instead of BackgroundTasks.

    pip install fastapi httpx && python examples/09_fastapi.py

`BackgroundTasks` die with the process. Here a request schedules durable work and answers at once; a worker inside the
same application runs it (`worker.serve()` is just another coroutine), and so does any other process of it.
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
        worker.stop()  # bodies end, results are reported, and only then does the application go


app = FastAPI(lifespan=lifespan)


@app.post("/reports/{customer}", status_code=202)
async def order(customer: str) -> dict[str, str]:
    task = await client.aschedule("report", {"customer": customer})
    return {"id": task.id}


@app.get("/reports/{task_id}")
async def look(task_id: str) -> dict[str, str | None]:
    found = await client.aget(task_id)
    return {"status": found.status if found else "unknown", "result": found.result if found else None}


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
