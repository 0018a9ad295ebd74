"""The suites that adapters subclass, made of all parts."""

from leasekit.backend import Backend, Redriver, Scheduler
from leasekit.testing.contract.batching import Batching
from leasekit.testing.contract.beating import Beating
from leasekit.testing.contract.cancelling import Cancelling
from leasekit.testing.contract.chains import Chains
from leasekit.testing.contract.claiming import Claiming
from leasekit.testing.contract.gates import Gates
from leasekit.testing.contract.granting import Granting
from leasekit.testing.contract.kinds import Kinds
from leasekit.testing.contract.limits import Limits
from leasekit.testing.contract.naming import Naming
from leasekit.testing.contract.purging import Purging
from leasekit.testing.contract.quotas import Quotas
from leasekit.testing.contract.reading import Reading
from leasekit.testing.contract.redriving import Redriving
from leasekit.testing.contract.retries import Retries
from leasekit.testing.contract.scheduling import Scheduling
from leasekit.testing.contract.settling import Settling
from leasekit.testing.contract.shares import Shares
from leasekit.testing.contract.successors import Successors

__all__ = ["BackendContract", "RedriverContract", "SchedulerContract"]


class BackendContract(Claiming, Granting, Beating, Batching, Settling):
    """The promises of `leasekit.backend.Backend`."""

    async def test_a_backend_that_takes_work_is_held_to_the_whole_contract(self, backend: Backend) -> None:
        assert not isinstance(backend, Scheduler) or isinstance(self, SchedulerContract), "subclass SchedulerContract"
        is_redriver = isinstance(backend, Redriver) and isinstance(backend, Scheduler)
        assert not is_redriver or isinstance(self, RedriverContract), "subclass RedriverContract"

    async def test_capabilities_are_bounds_of_one_or_more(self, backend: Backend) -> None:
        assert min(backend.capabilities.max_batch, backend.capabilities.max_claim) >= 1

    async def test_closing_twice_is_fine(self, backend: Backend) -> None:
        await backend.aclose()
        await backend.aclose()


class SchedulerContract(
    BackendContract,
    Scheduling,
    Retries,
    Limits,
    Successors,
    Cancelling,
    Reading,
    Naming,
    Purging,
    Kinds,
    Gates,
    Shares,
    Quotas,
    Chains,
):
    """The promises of `Scheduler` and `Backend`, and of `NameSource`, `Purger`, `KindDirectory`,
    `GateDirectory` and `ChainDirectory` if it is one.
    """


class RedriverContract(SchedulerContract, Redriving):
    """The promises of `leasekit.backend.Redriver`, for a backend that knows its tasks, and of `Scheduler`."""
