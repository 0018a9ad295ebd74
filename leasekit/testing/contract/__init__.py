"""What every adapter promises, as tests; subclass it and run it against the real thing.

    # conftest.py
    pytest.register_assert_rewrite("leasekit.testing.contract")     # before it is imported: failures show their values

    # test_mine.py
    from leasekit.testing.contract import SchedulerContract

    class TestMine(SchedulerContract):                              # BackendContract where the service takes no work
        @pytest.fixture
        async def backend(self, service_url): ...                   # yield one connection, close it afterwards
        @pytest.fixture
        async def other(self, service_url): ...                     # yield a second one, with another worker's name

The tests run on asyncio through anyio's pytest plugin (`pip install anyio pytest`). They put tasks of fresh kinds, so
that they can share a service. A capability that is declared false is held to that: a service without fences grants 0.

A service that does not take work by itself subclasses `BackendContract` and says in `put` how a task gets into it.
"""

from leasekit.testing.contract.suites import BackendContract, SchedulerContract

__all__ = ["BackendContract", "SchedulerContract"]
