"""What the commands share: their lines, and the reactor."""

from __future__ import annotations

import sys
from typing import Any, Final

PERMANENT: Final = 2
"""The exit status of what no retry can fix."""


def say(line: str) -> None:
    """A line of ours, on standard error."""
    print(f"flodl-tw: {line}", file=sys.stderr)


def make_reactor() -> Any:
    """The reactor, on a clock that no step of the wall clock moves."""
    import time

    from twisted.internet import reactor

    clock: Any = reactor
    # Twisted's clock is wall time, and a step of it would stall every timer or fire them all.
    clock.seconds = time.monotonic
    return clock
