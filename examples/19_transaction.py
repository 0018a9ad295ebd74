"""A task in the application's own transaction: it exists if, and only if, the order does.

    pip install fastapi httpx 'sqlalchemy[asyncio]' 'psycopg[binary]'
    LEASEKIT_STORE=postgresql://… python examples/19_transaction.py

leasekit's tables are in a schema of their own, beside the tables of the application. A request writes an order and
schedules its confirmation in one transaction. The worker is in this process, or in any other.
"""

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import httpx
import sqlalchemy as sa
from fastapi import FastAPI, HTTPException
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import leasekit
import leasekit.postgres
from leasekit import NewTask

STORE = os.environ["LEASEKIT_STORE"]
database = create_async_engine(STORE.replace("postgresql://", "postgresql+psycopg://"), poolclass=sa.NullPool)
client = leasekit.connect(STORE)
worker = leasekit.Worker(client)
confirmed: asyncio.Queue[int] = asyncio.Queue()


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "customer_order"
    id: Mapped[int] = mapped_column(primary_key=True)
    to: Mapped[str]


@worker.handler("confirm")
async def confirm(payload: dict[str, int]) -> None:
    async with AsyncSession(database) as session:
        order = await session.get_one(Order, payload["order"])  # it is there: the task came with it
    confirmed.put_nowait(order.id)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
    async with database.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    async with client, anyio.create_task_group() as group:
        group.start_soon(worker.serve)
        yield
        worker.stop()


app = FastAPI(lifespan=lifespan)


@app.post("/orders/{number}", status_code=201)
async def order(number: int, to: str) -> dict[str, str]:
    async with AsyncSession(database) as session, session.begin():
        session.add(Order(id=number, to=to))
        task = await leasekit.postgres.aschedule(session, NewTask(kind="confirm", payload={"order": number}))
        if to == "nobody":
            raise HTTPException(422, "an order needs a customer")  # rolls back the order, and its task
    return {"confirmation": task}


async def main() -> None:
    transport = httpx.ASGITransport(app)
    async with lifespan(app), httpx.AsyncClient(transport=transport, base_url="http://app") as browser:
        assert (await browser.post("/orders/1", params={"to": "nobody"})).status_code == 422
        assert (await browser.post("/orders/2", params={"to": "ada"})).status_code == 201
        print("confirmed: order", await asyncio.wait_for(confirmed.get(), timeout=30))


if __name__ == "__main__":
    asyncio.run(main())
