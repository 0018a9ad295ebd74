"""The command line: `leasekit …`."""
