"""The life of a task, the same for all services: statuses and events, their changes, and checks of requests. No I/O."""
