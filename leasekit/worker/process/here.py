"""Whether this process is an executor: what its main module does then, it does in vain."""

executing = False
