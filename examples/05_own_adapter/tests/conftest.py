import pytest

pytest.register_assert_rewrite("leasekit.testing.contract")  # failures show their values
