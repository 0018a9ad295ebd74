"""One call of a backend: what escapes from it, and a call that nobody waits for any more."""

import asyncio

import pytest

from leasekit._driver.retrying import call_once
from leasekit.errors import Unavailable


@pytest.mark.anyio
async def test_what_escapes_from_a_call_is_unavailable() -> None:
    async def odd() -> None:
        raise KeyError("odd")

    with pytest.raises(Unavailable, match="KeyError: 'odd'"):
        await call_once(odd, within=1)


def test_a_call_that_is_dropped_with_its_loop_ends_in_silence() -> None:
    loop = asyncio.new_event_loop()
    calls = []

    async def start() -> None:
        calls.append(call_once(asyncio.Event().wait, within=60))
        calls[0].send(None)

    loop.run_until_complete(start())
    loop.close()
    calls[0].close()  # on the old code: RuntimeError, for there is no running event loop
