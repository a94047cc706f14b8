"""What the commands share: their lines, and the reactor."""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Final, cast

from flodl_tw.core.addresses import DEFAULT_PORT
from flodl_tw.options import OptionReader

if TYPE_CHECKING:
    # A command that needs no reactor does not load Twisted.
    from twisted.internet.defer import Deferred

    from flodl_tw.reactor import IReactor

TRANSIENT: Final = 1
PERMANENT: Final = 2
"""The exit status of what no retry can fix."""
ENDING: Final = (signal.SIGTERM, signal.SIGINT)
SAME_SECS: Final = 0.05
"""One that comes twice as close together is one request: some launchers signal a process and its group."""


def say(line: str) -> None:
    """A line of ours, on standard error.  Where nobody can be told, nothing else must come of it."""
    try:
        print(f"flodl-tw: {line}", file=sys.stderr, flush=True)
    except OSError:
        _to_nowhere(2)


def end_as_init() -> None:
    """Have the first process of a container end by SIGTERM and SIGINT: without a handler none of its own kills it."""
    for number in ENDING:
        if os.getpid() == 1 and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda received, frame: os._exit(128 + received))


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


def make_reactor() -> IReactor:
    """The reactor, on a clock that no step of the wall clock moves, with look-ups that no exit waits for."""
    from twisted.internet import reactor

    from flodl_tw.deadlines import use_monotonic_clock
    from flodl_tw.resolver import use_thread_resolver

    use_monotonic_clock(reactor)
    use_thread_resolver(reactor)
    return cast("IReactor", reactor)


def run_to_end(
    reactor: IReactor,
    main: Callable[[], Coroutine[Deferred[object], object, int]],
    *,
    signalled: Callable[[int], None] | None = None,
    signals: Iterable[int] = ENDING,
    tell: Callable[[str], None] = say,
) -> int:
    """Run the reactor until ``main``'s coroutine gives an exit status; ``tell`` gets the line of a fault of ours.

    ``signalled`` is called in the reactor with each of ``signals`` that comes;
    without it a signal does to this process what it does to any.
    """
    from twisted.internet.defer import Deferred
    from twisted.python.failure import Failure

    status = [1]

    def finished(result: int | Failure) -> None:
        if isinstance(result, Failure):
            tell(f"this is a fault of the program itself, please report it: {result.getTraceback()}")
        else:
            status[0] = result
        reactor.stop()

    def begin() -> None:
        if signalled is not None:
            _catch(reactor, signals, signalled)
        Deferred.fromCoroutine(main()).addBoth(finished)

    reactor.callWhenRunning(begin)
    reactor.run(installSignalHandlers=signalled is not None)
    return status[0]


def _catch(reactor: IReactor, signals: Iterable[int], signalled: Callable[[int], None]) -> None:
    """Replace the reactor's own handlers; a signal that was ignored from the start (by nohup, say) stays ignored."""
    last: dict[int, float] = {}

    def came(number: int) -> None:
        before, last[number] = last.get(number, -math.inf), reactor.seconds()
        if number not in ENDING or last[number] >= before + SAME_SECS:
            signalled(number)

    for number in signals:
        if signal.getsignal(number) is not signal.SIG_IGN:
            # A handler interrupts whatever runs; all that it does is to ask for a call in the reactor's turn.
            signal.signal(number, lambda received, frame: reactor.callFromThread(came, received))
