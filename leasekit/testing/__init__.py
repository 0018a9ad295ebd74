"""Tools for tests: a backend in memory, a clock that is turned by hand, faults, and the contract of an adapter."""
