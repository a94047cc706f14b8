"""The first program of a rank: it leads a session, waits for the agent's word, and becomes the rank's program.

usage: launcher.py PROGRAM ARGS...

The agent holds signals back until this process has its own ways with them, and
writes a byte to descriptor ``GO`` once the guardian knows of the session.  It
runs without the package around it, on the standard library alone, so that it
is small and starts at once.  The agent imports its constants from here.
"""

from __future__ import annotations

import os
import signal
import sys

GO = 3
GUARDIAN = 4
"""The guardian's pipe.  It does not end before this copy is closed, so the guardian sees a session if there is one."""
NOT_FOUND = 127
NOT_RUN = 126
"""Exit codes of a program that could not be started, as shells have them."""


def main() -> None:
    """Become the program."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        # Python handles the first and ignores the others, which a program would inherit.
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if os.read(GO, 1) != b"g":
        # The agent died before the guardian knew of this session.
        os._exit(NOT_RUN)
    os.closerange(GO, GUARDIAN + 1)
    program = sys.argv[1]
    try:
        os.execve(program, sys.argv[1:], environment())  # noqa: S606
    except OSError as error:
        os.write(2, f"flodl-tw: {program} cannot be run: {error.strerror}\n".encode("utf-8", "surrogateescape"))
        os._exit(NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_RUN)


def environment() -> dict[bytes, bytes]:
    """What this process was given; ``os.environ`` may have a locale of Python's own in it."""
    with open("/proc/self/environ", "rb") as file:
        pairs = [entry.partition(b"=") for entry in file.read().split(b"\0") if entry]
    return {name: value for name, _, value in pairs}


if __name__ == "__main__":
    main()
