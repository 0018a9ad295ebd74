"""Stop code whose lease has ended: kernel timer, deadlines, idle handlers, stacks, the end of the process."""
