"""What the commands share: their lines, and the reactor."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any, Final

from flodl_tw.core.addresses import DEFAULT_PORT
from flodl_tw.options import OptionReader

PERMANENT: Final = 2
"""The exit status of what no retry can fix."""


def say(line: str) -> None:
    """A line of ours, on standard error.  Where nobody can be told, nothing else must come of it."""
    try:
        print(f"flodl-tw: {line}", file=sys.stderr, flush=True)
    except OSError:
        _to_nowhere(2)


def _to_nowhere(descriptor: int) -> None:
    """What Python still holds for it would fail again when it ends, with a status of its own."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


class Printer:
    """Lines on standard output, as its encoding and its reader let them out."""

    failed = False
    """Whether a line could not be written."""

    def show(self, line: str) -> None:
        """Write a line; where its reader has gone, die of it as any program does."""
        try:
            print(line, flush=True)
        except UnicodeEncodeError:
            print(line.encode("ascii", "backslashreplace").decode(), flush=True)
        except BrokenPipeError:
            # Its reader has seen enough.
            _to_nowhere(1)
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGPIPE)
        except OSError as error:
            say(f"standard output cannot be written: {error.strerror}")
            _to_nowhere(1)
            self.failed = True


def controller_of(given: OptionReader) -> tuple[str, int]:
    """The host and port of the controller that a command names; this machine's where it names none."""
    return given.endpoint("address") or ("127.0.0.1", DEFAULT_PORT)


def make_reactor() -> Any:
    """The reactor, on a clock that no step of the wall clock moves."""
    import time

    from twisted.internet import reactor

    clock: Any = reactor
    # Twisted's clock is wall time, and a step of it would stall every timer or fire them all.
    clock.seconds = time.monotonic
    return clock


def run_to_end(reactor: Any, main: Callable[[], Any], *, handlers: bool) -> int:
    """Run the reactor, with its own ``handlers`` of signals or without, until ``main``'s coroutine gives a status."""
    from twisted.internet.defer import Deferred
    from twisted.python.failure import Failure

    status = [1]

    def finished(result: Any) -> None:
        if isinstance(result, Failure):
            say(f"this is a fault of the program itself, please report it: {result.getTraceback()}")
        else:
            status[0] = result
        reactor.stop()

    reactor.callWhenRunning(lambda: Deferred.fromCoroutine(main()).addBoth(finished))
    reactor.run(installSignalHandlers=handlers)
    return status[0]
