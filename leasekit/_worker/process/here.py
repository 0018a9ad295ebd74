"""Whether this process is an executor: its main module must not run a worker in it."""

executing = False
