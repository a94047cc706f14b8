"""What the ranks print: cut into lines that name their rank, and written where nobody has to read it."""

from __future__ import annotations

import math
import os
import re
import stat
import threading
import time
from collections.abc import Callable
from functools import cache
from queue import SimpleQueue
from typing import Final

OUT: Final = 1
ERR: Final = 2
MAX_LINE: Final = 1 << 16
"""Bytes of the longest line; what is longer is cut there."""

CHUNK: Final = 4096
"""Bytes of one write: a pipe takes them in one piece, whoever else writes to it."""
RETRY_SECS: Final = 0.01
"""Between two writes to a descriptor that does not block and has no room."""

_RETURNS = re.compile(rb"\r\r+")
_LEADING_RETURN = re.compile(rb"^\r(?!\n)", re.MULTILINE)
_LONE_RETURN = re.compile(rb"\r(?!\n)")


def _unfinished(text: bytes | bytearray) -> int:
    """How many bytes at the end of ``text`` begin a UTF-8 sequence that is not whole; at most 3."""
    for back, byte in enumerate(reversed(text[-3:]), 1):
        if byte & 0xC0 == 0x80:
            continue
        wanted = 2 if 0xC2 <= byte <= 0xDF else 3 if 0xE0 <= byte <= 0xEF else 4 if 0xF0 <= byte <= 0xF4 else 1
        return back if wanted > back else 0
    return 0


class LineCutter:
    """Cuts one rank's stream into lines, each with ``prefix``; no bytes are changed but line ends.

    A line ends with ``\\n`` or ``\\r\\n``, kept as it is, or with a lone ``\\r``
    (a progress bar's), which comes out as ``\\n``.  Carriage returns make no
    blank lines.  At most one line of 64 KiB is held.
    """

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        # Text without line ends, and at most one carriage return after it: whether
        # that is a line end of its own is known when the next byte is.
        self._held = bytearray()
        self._continued = False
        """Whether the line that is held came out in part, so that its end alone is no line."""

    @property
    def partial(self) -> bool:
        """Whether a line has begun that ``flush_partial`` can write."""
        return self._ready() > 0

    def feed(self, data: bytes) -> bytes:
        """The lines that are whole with ``data``."""
        data = bytes(self._held) + data
        core = data.rstrip(b"\r")
        end = max(core.rfind(b"\n"), core.rfind(b"\r")) + 1
        self._held[:] = core[end:] + data[len(core) : len(core) + 1]
        lines = self._lines(core[:end]) if end else b""
        return lines + self._overlong() if len(self._held) > MAX_LINE else lines

    def flush_partial(self) -> bytes:
        """What there is of an unfinished line, as a line; the rest of it will be another."""
        ready = self._ready()
        if not ready:
            return b""
        text = bytes(self._held[:ready])
        # A carriage return after the text has done its work, too.
        del self._held[: ready + (self._held[ready : ready + 1] == b"\r")]
        self._continued = True
        return self._prefix + text + b"\n"

    def end(self) -> bytes:
        """The stream has ended: the line that is held, finished."""
        text = bytes(self._held).rstrip(b"\r")
        self._held.clear()
        self._continued = False
        return self._prefix + text + b"\n" if text else b""

    def _ready(self) -> int:
        """How much of what is held can be written as text: no line end, no half of a UTF-8 sequence."""
        if self._held.endswith(b"\r"):
            return len(self._held) - 1
        return len(self._held) - _unfinished(self._held[-3:])

    def _lines(self, body: bytes) -> bytes:
        """Lines that are whole, with prefixes."""
        if b"\r" in body:
            body = _RETURNS.sub(b"\r", body)
            body = _LEADING_RETURN.sub(b"", body)
            body = _LONE_RETURN.sub(b"\n", body)
        if self._continued:
            self._continued = False
            body = body[1 if body[:1] == b"\n" else 2 if body[:2] == b"\r\n" else 0 :]
        if len(body) > MAX_LINE:
            lines = body.split(b"\n")
            if max(map(len, lines)) > MAX_LINE:
                body = b"\n".join(map(self._cut, lines))
        return self._prefix + body[:-1].replace(b"\n", b"\n" + self._prefix) + b"\n" if body else b""

    def _cut(self, line: bytes) -> bytes:
        """The line with an end wherever it is too long."""
        text = line.removesuffix(b"\r")
        pieces = []
        start = 0
        while len(text) - start > MAX_LINE:
            end = start + MAX_LINE - _unfinished(text[start + MAX_LINE - 3 : start + MAX_LINE])
            pieces.append(text[start:end])
            start = end
        return b"\n".join([*pieces, line[start:]])

    def _overlong(self) -> bytes:
        """The pieces that can be cut off what is held, with prefixes."""
        pieces, _, rest = self._cut(bytes(self._held)).rpartition(b"\n")
        if not pieces:
            return b""
        self._held[:] = rest
        self._continued = True
        return self._prefix + pieces.replace(b"\n", b"\n" + self._prefix) + b"\n"


class Sink:
    """Writes bytes to descriptors in threads of its own, since nobody may be reading them.

    ``pause`` is called in ``write``, at once, when more than ``high`` bytes
    wait; ``resume`` once no more than ``low`` do, by ``from_thread`` in the
    reactor's thread.  Pausing is advice: what is written meanwhile is kept, so
    the bound is ``high`` and what was on its way.  ``broke`` gets each
    descriptor that has failed and why, in the reactor's thread, too.

    A pipe or terminal that blocks holds up no other, and neither do files on
    another device.  Each descriptor gets its bytes in order, and what one
    ``write`` gave is not mixed with another's there.  After an error, what goes
    to that descriptor is dropped; ``broken`` has the error.  Descriptors stay
    open until ``close`` has returned.
    """

    def __init__(
        self,
        pause: Callable[[], None],
        resume: Callable[[], None],
        from_thread: Callable[..., object],
        high: int = 1 << 20,
        low: int = 1 << 18,
        broke: Callable[[int, OSError], None] = lambda fd, error: None,
    ) -> None:
        self.broken: dict[int, OSError] = {}
        self.written = 0
        """Bytes that readers have taken so far."""
        self._pause, self._resume, self._from_thread = pause, resume, from_thread
        self._broke = broke
        self._high, self._low = high, low
        self._changed = threading.Condition()
        """Held for every change of what follows."""
        self._place = cache(_place)
        self._queues: dict[object, SimpleQueue[tuple[int, bytes]]] = {}
        self._queued = 0
        # Paused changes in the reactor's thread alone, so that no late resume follows a newer pause.
        self._paused = self._asked = self._closing = self._given_up = False

    def mend(self) -> None:
        """Try again what was broken, but our own standard output and errors: there may be room again."""
        with self._changed:
            self.broken = {fd: error for fd, error in self.broken.items() if fd in (OUT, ERR)}

    @property
    def paused(self) -> bool:
        """Whether it has asked for a pause that is not over."""
        return self._paused

    def write(self, fd: int, data: bytes) -> None:
        """Have ``data``, whole lines, written; never blocks, never raises.  After ``close`` it is dropped."""
        with self._changed:
            if not data or self._closing or fd in self.broken:
                return
            self._queue(fd).put((fd, data))
            self._queued += len(data)
            pause = self._queued > self._high and not self._paused
            self._paused |= pause
        if pause:
            self._pause()

    def close(self, seconds: float, most: float = math.inf) -> int:
        """Wait for what is queued; how many bytes were left, for no reader took any in ``seconds``.

        ``most`` is for all of it.  For the very end: it blocks.  Of what is left, nothing more is begun.
        """
        end = time.monotonic() + most
        before = -1
        with self._changed:
            self._closing = True
            while self._queued and before != self.written and (left := end - time.monotonic()) > 0:
                before = self.written
                self._changed.wait_for(lambda: not self._queued, min(seconds, left))
            self._given_up = True
            for queue in self._queues.values():
                queue.put((ERR, b""))
            return self._queued

    def _queue(self, fd: int) -> SimpleQueue[tuple[int, bytes]]:
        """What the descriptor's thread takes from; started when first needed, since none lives through a fork."""
        place = self._place(fd)
        if place not in self._queues:
            queue = self._queues[place] = SimpleQueue()
            threading.Thread(target=self._run, args=(queue,), name="output", daemon=True).start()
        return self._queues[place]

    def _run(self, queue: SimpleQueue[tuple[int, bytes]]) -> None:
        while not self._given_up:
            self._write_all(*queue.get())

    def _write_all(self, fd: int, data: bytes) -> None:
        """Write whole lines, as many at a time as one chunk holds, or a chunk of one that is longer."""
        start = 0
        while start < len(data) and fd not in self.broken and not self._given_up:
            end = data.rfind(b"\n", start, start + CHUNK) + 1 or start + CHUNK
            try:
                count = os.write(fd, data[start:end])
            except BlockingIOError:
                time.sleep(RETRY_SECS)
            except OSError as error:
                with self._changed:
                    self.broken[fd] = error
                self._from_thread(self._broke, fd, error)
            else:
                start += count
                self._done(count, written=count)
        if start < len(data):
            self._done(len(data) - start)

    def _done(self, count: int, written: int = 0) -> None:
        with self._changed:
            if self._given_up:
                return
            self.written += written
            self._queued -= count
            ask = self._paused and not self._asked and self._queued <= self._low
            self._asked |= ask
            if not self._queued:
                self._changed.notify_all()
        if ask:
            self._from_thread(self._resume_if_low)

    def _resume_if_low(self) -> None:
        with self._changed:
            self._asked = False
            if not self._paused or self._closing or self._queued > self._low:
                # The next time that it drains will ask again.
                return
            self._paused = False
        self._resume()


def _place(fd: int) -> object:
    """What has a thread of its own: a pipe or terminal, whichever descriptors lead there, or a device with files.

    It may block for a file of a server that is gone, so it is asked once, when the file was just opened.
    """
    try:
        found = os.fstat(fd)
    except OSError:
        # The write will say what is wrong with it.
        return fd
    return found.st_dev if stat.S_ISREG(found.st_mode) else (found.st_dev, found.st_ino)
