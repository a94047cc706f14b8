"""The log of a controller whose standard output nobody reads."""

from __future__ import annotations

import errno
import fcntl
import os
import unittest
from collections.abc import Callable
from queue import SimpleQueue
from typing import cast
from unittest import mock

from twisted.internet.task import Clock
from twisted.logger import capturedLogs, formatEvent

from flodl_tw.log_output import FLUSH_SECS, MEND_SECS, MOST_WAITING, StandardOutput
from flodl_tw.reactor import IReactor


class QueuedCalls(Clock):
    """A clock whose calls from threads wait until the test makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.queued: SimpleQueue[Callable[[], object]] = SimpleQueue()

    def callFromThread(self, call: Callable[..., object], *given: object) -> None:  # noqa: N802  Twisted's name
        self.queued.put(lambda: call(*given))

    def addSystemEventTrigger(self, *given: object) -> None:  # noqa: N802  Twisted's name
        """The tests end it themselves."""


class StandardOutputTests(unittest.TestCase):
    """A pipe for it, with room for 4 KiB."""

    def setUp(self) -> None:
        self.read, self.write = os.pipe()
        self.addCleanup(os.close, self.read)
        self.addCleanup(os.close, self.write)
        fcntl.fcntl(self.write, fcntl.F_SETPIPE_SZ, 4096)
        self.reactor = QueuedCalls()
        self.output = StandardOutput(cast(IReactor, self.reactor), self.write)
        # Before the pipe is closed.
        self.addCleanup(self.output.finish)

    def drained(self, least: int) -> bytes:
        """At least so many bytes of what was written."""
        found = b""
        while len(found) < least:
            found += os.read(self.read, 1 << 16)
        return found

    def test_lines_beyond_the_bound_are_dropped_and_counted_in_one_line(self) -> None:
        line = "x" * 99 + "\n"
        most = MOST_WAITING // len(line) + 1
        os.write(self.write, b"x" * 4096)
        for _ in range(most + 7):
            self.output.write(line)
        with capturedLogs() as events:
            self.assertEqual(len(self.drained(4096 + most * len(line))), 4096 + most * len(line))
            self.reactor.queued.get(timeout=60)()
        self.assertEqual(
            [formatEvent(event) for event in events], ["lines of the log that nobody took, and that are lost: 7"]
        )
        self.output.write("the next\n")
        self.assertEqual(self.drained(9), b"the next\n")

    def test_a_full_disk_is_tried_again(self) -> None:
        real, full = os.write, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with mock.patch("os.write", side_effect=lambda fd, data: self.fails(full, fd, real, data)):
            self.output.write("lost\n")
            self.reactor.queued.get(timeout=60)()
        self.output.write("dropped\n")
        with capturedLogs() as events:
            self.reactor.advance(MEND_SECS)
        self.assertIn("are lost: 1", str(formatEvent(events[0])))
        self.output.write("there\n")
        self.assertEqual(self.drained(6), b"there\n")

    def fails(self, error: OSError, fd: int, write: Callable[[int, bytes], int], data: bytes) -> int:
        """Write elsewhere alone."""
        if fd == self.write:
            raise error
        return write(fd, data)

    def test_what_its_encoding_does_not_have_is_escaped(self) -> None:
        self.output.write("\udc80\n")
        self.assertEqual(self.drained(7), b"\\udc80\n")

    def test_its_end_waits_for_a_reader_but_not_for_long(self) -> None:
        self.output.write("x" * 9999)
        with mock.patch("flodl_tw.log_output.FLUSH_SECS", FLUSH_SECS / 100):
            self.output.finish()
        self.output.write("nobody\n")
        self.drained(4096)
        os.set_blocking(self.read, False)
        while True:
            try:
                os.read(self.read, 1 << 16)
            except BlockingIOError:
                break
        self.output.write("somebody\n")
        os.set_blocking(self.read, True)
        self.assertTrue(self.drained(9).endswith(b"somebody\n"))
