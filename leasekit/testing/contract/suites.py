"""The suites that adapters subclass, made of all parts."""

from leasekit.backend import Backend, DeadLetters, Scheduler
from leasekit.testing.contract.access import Access
from leasekit.testing.contract.batching import Batching
from leasekit.testing.contract.beating import Beating
from leasekit.testing.contract.bulk import Bulk
from leasekit.testing.contract.cancelling import Cancelling
from leasekit.testing.contract.chains import Chains
from leasekit.testing.contract.claiming import Claiming
from leasekit.testing.contract.debouncing import Debouncing
from leasekit.testing.contract.draining import Draining
from leasekit.testing.contract.gates import Gates
from leasekit.testing.contract.granting import Granting
from leasekit.testing.contract.kinds import Kinds
from leasekit.testing.contract.labelling import Labelling
from leasekit.testing.contract.limits import Limits
from leasekit.testing.contract.naming import Naming
from leasekit.testing.contract.periodic import Periodic
from leasekit.testing.contract.purging import Purging
from leasekit.testing.contract.quotas import Quotas
from leasekit.testing.contract.reading import Reading
from leasekit.testing.contract.redriving import Redriving
from leasekit.testing.contract.rescheduling import Rescheduling
from leasekit.testing.contract.retries import Retries
from leasekit.testing.contract.scheduling import Scheduling
from leasekit.testing.contract.settling import Settling
from leasekit.testing.contract.shares import Shares
from leasekit.testing.contract.start_deadlines import StartDeadlines
from leasekit.testing.contract.successors import Successors
from leasekit.testing.contract.tagging import Tagging

__all__ = ["BackendContract", "DeadLettersContract", "SchedulerContract"]


class BackendContract(Claiming, Granting, Beating, Batching, Settling):
    """The promises of `leasekit.backend.Backend`."""

    async def test_a_backend_that_takes_work_is_held_to_the_whole_contract(self, backend: Backend) -> None:
        assert not isinstance(backend, Scheduler) or isinstance(self, SchedulerContract), "subclass SchedulerContract"
        is_redriver = isinstance(backend, DeadLetters) and isinstance(backend, Scheduler)
        assert not is_redriver or isinstance(self, DeadLettersContract), "subclass DeadLettersContract"

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
    Periodic,
    Gates,
    Draining,
    Shares,
    Quotas,
    Chains,
    Rescheduling,
    Debouncing,
    StartDeadlines,
    Bulk,
    Tagging,
    Labelling,
    Access,
):
    """The promises of `Scheduler` and `Backend`, and of `NameSource`, `Purger`, `KindDirectory`,
    `PeriodicDirectory`, `GateDirectory`, `WorkerDrainer`, `ChainDirectory`, `TokenDirectory`,
    `Rescheduler` and `BulkChanger` if it is one.
    """


class DeadLettersContract(SchedulerContract, Redriving):
    """The promises of `leasekit.backend.DeadLetters`, for a backend that knows its tasks, and of `Scheduler`."""
