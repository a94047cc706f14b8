"""Where ``twistd`` logs to for a controller: a file that can be opened again, or standard output, read or not."""

from __future__ import annotations

import atexit
import errno
import os
import select
import sys
from collections.abc import Callable
from typing import Final, TextIO, cast

from twisted.logger import ILogObserver, Logger, textFileLogObserver
from twisted.python.logfile import LogFile
from twisted.python.usage import Options

from flodl_tw.agent.output import OUT, Sink
from flodl_tw.core.errors import SettingError
from flodl_tw.reactor import IReactor

MOST_WAITING: Final = 1 << 20
"""Bytes of log that wait for a reader; what is more is dropped, and counted."""
FLUSH_SECS: Final = 1.0
"""How long a reader may take nothing of the rest of the log, at the end."""
MEND_SECS: Final = 10.0
"""Until a full disk is tried again."""
_log = Logger()
_chosen: list[LogOutput] = []


class StandardOutput:
    """Text for standard output, by a thread of its own: who does not read it holds up nothing else.

    What its encoding does not have is escaped.  After the reactor has stopped there may be no thread any more, and
    what can be written at once is.
    """

    def __init__(self, reactor: IReactor, descriptor: int = OUT) -> None:
        self._clock = reactor
        self._descriptor = descriptor
        self._encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        self._sink = Sink(
            lambda: None, self._tell, reactor.callFromThread, MOST_WAITING, MOST_WAITING // 2, self._broke
        )
        self._dropped = 0
        self._finished = False
        reactor.addSystemEventTrigger("after", "shutdown", self.finish)
        atexit.register(self.finish)

    def write(self, text: str) -> None:
        """Have it written; it never blocks."""
        data = text.encode(self._encoding, "backslashreplace")
        if self._finished:
            self._write_now(data)
        elif self._sink.paused or self._descriptor in self._sink.broken:
            self._dropped += 1
        else:
            self._sink.write(self._descriptor, data)

    def flush(self) -> None:
        """Nothing is held back."""

    def finish(self) -> None:
        """Give a reader the time to take what is left, and no more."""
        if not self._finished:
            self._finished = True
            self._sink.close(FLUSH_SECS)
            self._tell()

    def _write_now(self, data: bytes) -> None:
        try:
            if select.select([], [self._descriptor], [], 0)[1]:
                os.write(self._descriptor, data[: select.PIPE_BUF])
        except OSError:
            # Nobody is there to be told.
            self._finished = True

    def _tell(self) -> None:
        dropped, self._dropped = self._dropped, 0
        if dropped:
            _log.warn("lines of the log that nobody took, and that are lost: {dropped}", dropped=dropped)

    def _broke(self, descriptor: int, error: OSError) -> None:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            self._clock.callLater(MEND_SECS, self._mend)

    def _mend(self) -> None:
        self._sink.broken.pop(self._descriptor, None)
        self._tell()


class File:
    """Text for a file, which is opened again where somebody has moved it away."""

    def __init__(self, path: str) -> None:
        try:
            self._file = LogFile.fromFullPath(path)
        except OSError as error:
            limit = f"it cannot be written ({error.strerror})"
            raise SettingError("--logfile", os.path.abspath(path), limit, "name one in a folder of yours") from None

    def write(self, text: str) -> None:
        self._file.write(text.encode("utf-8", "backslashreplace"))

    def flush(self) -> None:
        self._file.flush()

    def reopen(self) -> None:
        """Go on in the file that has its name now; OSError, and in the old one, where that cannot be."""
        with open(self._file.path, "ab"):
            pass
        self._file.reopen()


class LogOutput:
    """Chooses what ``twistd`` was asked for, unless that is a logger of somebody's own, or the system's."""

    def __init__(self, twistd: Options, refused: Callable[[SettingError], SystemExit]) -> None:
        self._twistd = twistd
        self._refused = refused
        self._file: File | None = None
        if not twistd["syslog"] and not twistd.get("logger"):
            # A name is all that it takes.
            twistd["logger"] = f"{__name__}.observer"
            _chosen.append(self)

    def reopen(self) -> None:
        """What SIGHUP asks for; what cannot be is a warning."""
        if self._file is None:
            return
        try:
            self._file.reopen()
        except OSError as error:
            _log.warn("--logfile cannot be opened again ({why}); going on in the old one", why=error.strerror)

    def observer(self) -> ILogObserver:
        """What twistd gives its events; SystemExit where the file cannot be written."""
        name = self._twistd["logfile"]
        daemon = not self._twistd["nodaemon"]
        if not daemon and name in ("-", None, ""):
            from twisted.internet import reactor

            return cast(ILogObserver, textFileLogObserver(cast(TextIO, StandardOutput(cast(IReactor, reactor)))))
        try:
            if name == "-":
                raise SettingError("--logfile", name, "a daemon has no standard output", "name a file, or add -n")
            self._file = File(name or "twistd.log")
        except SettingError as error:
            raise self._refused(error) from None
        return cast(ILogObserver, textFileLogObserver(cast(TextIO, self._file)))


def observer() -> ILogObserver:
    """The logger factory of ``twistd --logger``."""
    return _chosen[-1].observer()
