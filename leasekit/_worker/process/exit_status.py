"""Exit status: how a process ended, in words that say what to look for."""

import signal

_MEANINGS = {
    signal.SIGSEGV: "segmentation fault",
    signal.SIGABRT: "aborted",
    signal.SIGBUS: "bus error",
    signal.SIGFPE: "arithmetic error",
    signal.SIGILL: "illegal instruction",
}


def ended(code: int, *, memory_ran_out: bool) -> str:
    """Describe how a process ended, by its exit code (negative: a signal): "exited with code 3", "was killed by …"."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        number = signal.Signals(-code)
    except ValueError:  # a real-time signal
        return f"was killed by signal {-code}"
    if number is signal.SIGKILL:
        whom = "probably because memory ran out" if memory_ran_out else "from outside, or possibly for want of memory"
        return f"was killed by SIGKILL ({whom})"
    meaning = _MEANINGS.get(number)
    return f"was killed by {number.name} ({meaning})" if meaning else f"was killed by {number.name}"
