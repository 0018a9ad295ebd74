"""Sans-IO: no clock, thread, socket or logger; `now` is an argument."""
