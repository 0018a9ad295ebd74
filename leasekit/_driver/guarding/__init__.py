"""Stop code whose lease has ended: kernel timer, deadlines, idle handlers, stack dumps, the end of the process."""
