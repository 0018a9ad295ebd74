"""The life of a task, once for all services: the table, what each event changes, what a request may hold. No I/O."""
