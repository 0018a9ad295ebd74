"""The promises of every adapter, as tests: subclass a contract and run it against the real service.

    # conftest.py
    pytest.register_assert_rewrite("leasekit.testing.contract")     # before it is imported: failures show their values

    # test_mine.py
    from leasekit.testing.contract import SchedulerContract

    class TestMine(SchedulerContract):                              # BackendContract where the service takes no work,
                                                                    # DeadLettersContract where it has dead letters
        @pytest.fixture
        async def backend(self, service_url): ...                   # yield one connection, close it afterwards
        @pytest.fixture
        async def other(self, service_url): ...                     # yield a second one, with another worker's name

The tests run on asyncio through anyio's pytest plugin (`pip install anyio pytest`). Each test uses a new kind, so that
tests can share a service. A capability that is declared false is checked too: a service without fences must grant 0.

For a service that takes no work by itself, subclass `BackendContract` and override `put`, which schedules a task.
"""

from leasekit.testing.contract.suites import BackendContract, DeadLettersContract, SchedulerContract

__all__ = ["BackendContract", "DeadLettersContract", "SchedulerContract"]
