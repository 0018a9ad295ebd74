"""Shift the wall clock of a process by the number of seconds in the file that CHAOS_CLOCK names.

Python loads this module by itself where its folder is on PYTHONPATH. The shift acts like a step of the machine's clock:
only readers of the wall clock see it, and the monotonic clocks go on.
"""

import mmap
import os
import struct
import time

_memory = mmap.mmap(os.open(os.environ["CHAOS_CLOCK"], os.O_RDONLY), 8, access=mmap.ACCESS_READ)
_time, _time_ns = time.time, time.time_ns


def _shift() -> float:
    return float(struct.unpack("d", _memory[:8])[0])


time.time = lambda: _time() + _shift()
time.time_ns = lambda: _time_ns() + int(_shift() * 1e9)
