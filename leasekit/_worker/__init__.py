"""Parts of a worker: controllers claim ahead, executors run handlers, `worker.Worker` is the handle."""
