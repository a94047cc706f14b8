"""What ranks print: lines that name their rank, every byte of them, and a reader that sleeps stops nobody."""

from __future__ import annotations

import errno
import fcntl
import os
import queue
import re
import threading
import time
import tracemalloc
import unittest
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from flodl_tw.agent.output import MAX_LINE, LineCutter, Sink

PREFIX = b"[gpu-a:r3] "
SECONDS = 60.0
"""How long a test waits for what must happen."""

MODEST = settings(max_examples=200, deadline=None, database=None)
EURO = "€".encode()

PIECES = st.lists(
    st.sampled_from([b"\r", b"\n", b"\r\n", b"a", b"bc", EURO, b"\xff", b"\xf0\x9f", b"\xe9", b"\x80", b"\0", b""])
)
LONG_PIECES = st.lists(
    st.sampled_from([b"\r", b"\n", b"a", b"x" * 40_000, EURO * 30_000, b"\xf0\x9f\x98\x80" * 9_000, b"\xf0\x9f"]),
    max_size=8,
)


def whole(text: bytes) -> bytes:
    """What a cutter makes of a stream that comes at once."""
    cutter = LineCutter(PREFIX)
    return cutter.feed(text) + cutter.end()


def prefixed(*lines: bytes) -> bytes:
    return b"".join(PREFIX + line for line in lines)


def expected(text: bytes) -> bytes:
    """The same by the rule in a loop, for lines that are not too long."""
    lines = []
    start = 0
    for end in re.finditer(rb"\r*\n|\r+", text):
        line, start = text[start : end.start()], end.end()
        if end[0].endswith(b"\n"):
            lines.append(line + end[0][-2:])
        elif line:
            lines.append(line + b"\n")
    if text[start:]:
        lines.append(text[start:] + b"\n")
    return prefixed(*lines)


def bare(output: bytes) -> bytes:
    """Without prefixes and line ends."""
    return output.replace(PREFIX, b"").replace(b"\r", b"").replace(b"\n", b"")


class LineTests(unittest.TestCase):
    """Where a line ends."""

    def test_each_line_gets_the_prefix_and_keeps_its_end(self) -> None:
        for text, lines in (
            (b"", ()),
            (b"one\n", (b"one\n",)),
            (b"one\ntwo\n", (b"one\n", b"two\n")),
            (b"one\r\ntwo\r\n", (b"one\r\n", b"two\r\n")),
            (b"\n\n", (b"\n", b"\n")),
            (b"\r\n\r\n", (b"\r\n", b"\r\n")),
            (b"no end", (b"no end\n",)),
            (b"\xff\xfe\0\x1b[31m\xe9\n", (b"\xff\xfe\0\x1b[31m\xe9\n",)),
            (b"caf\xc3\n", (b"caf\xc3\n",)),
            (b"caf\xc3", (b"caf\xc3\n",)),
            (b"a\x0bb\x0cc\xc2\x85d\n", (b"a\x0bb\x0cc\xc2\x85d\n",)),
        ):
            with self.subTest(text=text):
                self.assertEqual(whole(text), prefixed(*lines))

    def test_each_state_of_a_progress_bar_is_a_line_and_none_is_blank(self) -> None:
        for text, lines in (
            (b"10%\r20%\r30%\n", (b"10%\n", b"20%\n", b"30%\n")),
            (b"\r10%\r20%\n", (b"10%\n", b"20%\n")),
            (b"10%\r\r\r20%\r", (b"10%\n", b"20%\n")),
            (b"10%\r\r\n20%\n", (b"10%\r\n", b"20%\n")),
            (b"done\n\r10%\r", (b"done\n", b"10%\n")),
            (b"done\n\r\r10%", (b"done\n", b"10%\n")),
            (b"\r", ()),
            (b"\r\r\r", ()),
        ):
            with self.subTest(text=text):
                self.assertEqual(whole(text), prefixed(*lines))

    def test_a_line_is_written_as_soon_as_its_end_is_certain(self) -> None:
        cutter = LineCutter(PREFIX)
        self.assertEqual(cutter.feed(b"10%"), b"")
        self.assertEqual(cutter.feed(b"\r"), b"")
        self.assertEqual(cutter.feed(b"20%"), prefixed(b"10%\n"))
        self.assertEqual(cutter.feed(b"\r"), b"")
        self.assertEqual(cutter.feed(b"\n"), prefixed(b"20%\r\n"))
        self.assertEqual(cutter.feed(b"a\nb\nc"), prefixed(b"a\n", b"b\n"))
        self.assertEqual(cutter.end(), prefixed(b"c\n"))
        self.assertEqual(cutter.end(), b"")

    @MODEST
    @given(PIECES)
    def test_any_stream_is_cut_by_the_rule(self, pieces: list[bytes]) -> None:
        self.assertEqual(whole(b"".join(pieces)), expected(b"".join(pieces)))

    @MODEST
    @given(st.one_of(PIECES, LONG_PIECES), st.randoms(use_true_random=False))
    def test_how_a_stream_is_split_makes_no_difference(self, pieces: list[bytes], random: object) -> None:
        text = b"".join(pieces)
        cutter, written = LineCutter(PREFIX), b""
        for data in split(text, random):
            written += cutter.feed(data)
        self.assertEqual(written + cutter.end(), whole(text))

    @MODEST
    @given(st.one_of(PIECES, LONG_PIECES), st.randoms(use_true_random=False))
    def test_flushes_lose_and_change_no_byte(self, pieces: list[bytes], random: object) -> None:
        text = b"".join(pieces)
        cutter, written = LineCutter(PREFIX), b""
        for data in split(text, random):
            written += cutter.feed(data)
            partial = cutter.partial
            flushed = cutter.flush_partial()
            self.assertEqual(bool(flushed), partial)
            self.assertFalse(cutter.partial)
            written += flushed
        written += cutter.end()
        self.assertEqual(bare(written), bare(text))
        self.assertTrue(written.endswith(b"\n") or not written)
        for line in written.split(b"\n")[:-1]:
            self.assertTrue(line.startswith(PREFIX))


def split(text: bytes, random: object) -> list[bytes]:
    """The text in pieces, about eight of them."""
    places = sorted(random.choices(range(len(text) + 1), k=7))  # type: ignore[attr-defined]
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


class FlushTests(unittest.TestCase):
    """A line that waits for its end."""

    def test_an_unfinished_line_comes_out_and_its_rest_is_a_line_of_its_own(self) -> None:
        cutter = LineCutter(PREFIX)
        self.assertEqual(cutter.feed(b"loading"), b"")
        self.assertTrue(cutter.partial)
        self.assertEqual(cutter.flush_partial(), prefixed(b"loading\n"))
        self.assertFalse(cutter.partial)
        self.assertEqual(cutter.flush_partial(), b"")
        self.assertEqual(cutter.feed(b" done\nnext\n"), prefixed(b" done\n", b"next\n"))

    def test_the_end_of_a_line_that_came_out_is_no_blank_line(self) -> None:
        for ends in ((b"\n",), (b"\r\n",), (b"\r", b"\n"), (b"\r", b"\r", b"\n"), (b"\r\r\n",)):
            with self.subTest(ends=ends):
                cutter = LineCutter(PREFIX)
                cutter.feed(b"loading")
                cutter.flush_partial()
                self.assertEqual(b"".join(cutter.feed(end) + cutter.flush_partial() for end in ends), b"")
                self.assertEqual(cutter.feed(b"\nnext\n"), prefixed(b"\n", b"next\n"))

    def test_a_state_of_a_bar_comes_out_once_however_slow_the_bar_is(self) -> None:
        for states in ((b"10%\r", b"20%\r", b"30%\n"), (b"\r10%", b"\r20%", b"\r30%", b"\n"), (b"10%\r", b"20%\r\n")):
            with self.subTest(states=states):
                cutter, written = LineCutter(PREFIX), b""
                for state in states:
                    written += cutter.feed(state) + cutter.flush_partial()
                lines = [line.strip() + b"\n" for line in states if line.strip()]
                self.assertEqual((written + cutter.end()).replace(b"\r\n", b"\n"), prefixed(*lines))

    def test_nothing_that_is_held_is_no_partial_line(self) -> None:
        for text in (b"", b"one\n", b"one\r\n", b"\r", b"one\n\r"):
            with self.subTest(text=text):
                cutter = LineCutter(PREFIX)
                cutter.feed(text)
                self.assertFalse(cutter.partial)
                self.assertEqual(cutter.flush_partial(), b"")

    def test_a_flush_splits_no_character(self) -> None:
        for character in "é€😀":
            encoded = character.encode()
            for size in range(1, len(encoded)):
                with self.subTest(character=character, size=size):
                    cutter = LineCutter(PREFIX)
                    cutter.feed(b"ab" + encoded[:size])
                    self.assertEqual(cutter.flush_partial(), prefixed(b"ab\n"))
                    self.assertFalse(cutter.partial)
                    self.assertEqual(cutter.feed(encoded[size:] + b"\n"), prefixed(encoded + b"\n"))

    def test_what_cannot_become_a_character_is_held_back_by_no_flush(self) -> None:
        for text in (
            b"\xff",
            b"\x80\x80\x80\x80",
            b"\xc0\x80",
            b"\xf5\x80",
            b"\xe9a",
            b"\xe2\x82\xac\x80",
            b"ab\xc3\r",
        ):
            with self.subTest(text=text):
                cutter = LineCutter(PREFIX)
                cutter.feed(text)
                self.assertEqual(cutter.flush_partial(), prefixed(text.rstrip(b"\r") + b"\n"))


class LongLineTests(unittest.TestCase):
    """Memory is bounded."""

    def test_a_line_of_the_limit_is_whole_and_a_longer_one_is_cut_there(self) -> None:
        line = b"x" * MAX_LINE
        for text, lines in (
            (line + b"\n", (line + b"\n",)),
            (line + b"\r\n", (line + b"\r\n",)),
            (line, (line + b"\n",)),
            (line + b"y\r\n", (line + b"\n", b"y\r\n")),
            (line + line + b"y", (line + b"\n", line + b"\n", b"y\n")),
            (b"a\n" + line + b"y\nb\n", (b"a\n", line + b"\n", b"y\n", b"b\n")),
        ):
            with self.subTest(size=len(text)):
                self.assertEqual(whole(text), prefixed(*lines))

    def test_the_end_of_a_line_of_the_limit_may_come_later(self) -> None:
        cutter, line = LineCutter(PREFIX), b"x" * MAX_LINE
        self.assertEqual([cutter.feed(data) for data in (line, b"\r")], [b"", b""])
        self.assertEqual(cutter.feed(b"\n"), prefixed(line + b"\r\n"))

    def test_no_cut_splits_a_character(self) -> None:
        for shift in range(4):
            text = b"x" * shift + "😀".encode() * (MAX_LINE // 2)
            lines = whole(text).replace(PREFIX, b"").split(b"\n")
            with self.subTest(shift=shift):
                self.assertEqual(b"".join(lines), text)
                for line in lines:
                    line.decode("utf-8")
                    self.assertLessEqual(len(line), MAX_LINE)

    def test_a_line_without_end_costs_no_more_than_one(self) -> None:
        cutter, data = LineCutter(PREFIX), b"x" * 10_000
        tracemalloc.start()
        self.addCleanup(tracemalloc.stop)
        for _ in range(2_000):
            cutter.feed(data)
        self.assertLess(tracemalloc.get_traced_memory()[1], 8 * MAX_LINE)

    def test_returns_without_end_are_not_kept(self) -> None:
        cutter = LineCutter(PREFIX)
        for _ in range(100):
            self.assertEqual(cutter.feed(b"\r" * 1000), b"")
        self.assertEqual(cutter.feed(b"x\n"), prefixed(b"x\n"))

    def test_megabytes_are_cut_in_no_time(self) -> None:
        for data in (b"a line of text\n" * 70_000, b"10%\r" * 250_000, b"\n" * 1_000_000, b"x" * 1_000_000):
            began = time.process_time()
            whole(data)
            with self.subTest(data=data[:4]):
                # A loop over bytes takes longer than this on any machine.
                self.assertLess(time.process_time() - began, 0.5)


class Owner:
    """The reactor's side of a sink: what it was told, in order."""

    def __init__(self, test: SinkTestCase, high: int = 1 << 16, low: int = 1 << 14) -> None:
        self.told: list[str] = []
        self.calls: queue.Queue[Callable[[], None]] = queue.Queue()
        self.sink = Sink(
            lambda: self.told.append("pause"),
            lambda: self.told.append("resume"),
            lambda call, *told: self.calls.put(lambda: call(*told)),
            high,
            low,
            broke=lambda fd, error: self.told.append(f"broke: {error.strerror}"),
        )
        test.sinks.append(self.sink)

    def turn(self) -> None:
        """Do what the thread asks for next."""
        self.calls.get(timeout=SECONDS)()


class SinkTestCase(unittest.TestCase):
    """With pipes that are closed at the end.

    A sink's threads may still be at a write then, and must not find another
    test's descriptor under the number: what it writes to is closed after its end.
    """

    def setUp(self) -> None:
        self.sinks: list[Sink] = []
        self.readers: list[int] = []
        self.others: list[int] = []
        self.addCleanup(self._shut)

    def pipe(self, blocking: bool = True) -> tuple[int, int]:
        reader, writer = os.pipe()
        os.set_blocking(writer, blocking)
        self.readers.append(reader)
        return reader, self.held(writer)

    def held(self, fd: int) -> int:
        """A descriptor that is to be open until the end."""
        self.others.append(fd)
        return fd

    def shut(self, fd: int) -> None:
        """Close one of them now."""
        for fds in (self.readers, self.others):
            if fd in fds:
                fds.remove(fd)
        os.close(fd)

    def _shut(self) -> None:
        for sink in self.sinks:
            sink.close(0)
        # This ends a write that nobody takes.
        for fd in self.readers:
            os.close(fd)
        self.join()
        for fd in self.others:
            os.close(fd)

    def join(self) -> None:
        """Wait for the end of every sink's threads."""
        for thread in threading.enumerate():
            if thread.name == "output":
                thread.join(SECONDS)
                self.assertFalse(thread.is_alive())

    def read(self, reader: int, count: int) -> bytes:
        """Exactly so many bytes."""
        got = b""
        while len(got) < count:
            data = os.read(reader, count - len(got))
            if not data:
                break
            got += data
        return got


class SinkTests(SinkTestCase):
    """Bytes reach their descriptor, or stop nobody."""

    def test_what_is_written_comes_out_in_order(self) -> None:
        for blocking in (True, False):
            with self.subTest(blocking=blocking):
                owner, (reader, writer) = Owner(self), self.pipe(blocking)
                lines = [b"line %d\n" % number for number in range(2_000)]
                for line in lines:
                    owner.sink.write(writer, line)
                text = b"".join(lines)
                self.assertEqual(self.read(reader, len(text)), text)
                self.assertEqual(owner.sink.close(SECONDS), 0)
                self.assertEqual((owner.sink.broken, owner.told), ({}, []))

    def test_a_pipe_that_nobody_reads_stops_no_write(self) -> None:
        for blocking in (True, False):
            with self.subTest(blocking=blocking):
                owner, (reader, writer) = Owner(self), self.pipe(blocking)
                # More than a pipe takes, and more than is asked for.
                text = b"".join(b"%099d\n" % number for number in range(10_000))
                began = time.monotonic()
                for start in range(0, len(text), 10_000):
                    owner.sink.write(writer, text[start : start + 10_000])
                self.assertLess(time.monotonic() - began, SECONDS)
                self.assertEqual(owner.told, ["pause"])
                self.assertEqual(self.read(reader, len(text)), text)
                owner.turn()
                self.assertEqual(owner.told, ["pause", "resume"])
                self.assertTrue(owner.calls.empty())

    def test_pause_comes_within_the_write_that_is_too_much(self) -> None:
        owner, (_, writer) = Owner(self, high=1 << 20), self.pipe()
        owner.sink.write(writer, b"x" * (1 << 20))
        self.assertEqual(owner.told, [])
        owner.sink.write(writer, b"x" * (1 << 17))
        self.assertEqual(owner.told, ["pause"])

    def test_a_resume_that_is_late_does_not_follow_a_newer_flood(self) -> None:
        owner, (reader, writer) = Owner(self), self.pipe()
        flood = b"x" * (1 << 18)
        owner.sink.write(writer, flood)
        self.read(reader, len(flood))
        asked = owner.calls.get(timeout=SECONDS)
        owner.sink.write(writer, flood)
        asked()
        self.assertEqual(owner.told, ["pause"])
        self.read(reader, len(flood))
        owner.turn()
        self.assertEqual(owner.told, ["pause", "resume"])

    def test_a_reader_that_sleeps_holds_up_no_other(self) -> None:
        owner, (_, stuck) = Owner(self), self.pipe()
        reader, writer = self.pipe()
        owner.sink.write(stuck, b"x" * (1 << 18))
        owner.sink.write(writer, b"heard\n")
        self.assertEqual(self.read(reader, 6), b"heard\n")

    def test_a_descriptor_without_room_that_does_not_block_is_tried_again(self) -> None:
        owner, (reader, writer) = Owner(self), self.pipe()
        # A counter takes what fits beside its value.
        counter = self.held(os.eventfd(1, os.EFD_NONBLOCK))
        owner.sink.write(counter, b"\xfe" + b"\xff" * 7)
        owner.sink.write(writer, b"heard\n")
        self.assertEqual(self.read(reader, 6), b"heard\n")
        self.assertEqual(os.eventfd_read(counter), 1)
        self.assertEqual(owner.sink.close(SECONDS), 0)
        self.assertEqual(os.eventfd_read(counter), (1 << 64) - 2)
        self.assertEqual(owner.sink.broken, {})

    def test_one_write_is_not_mixed_with_another(self) -> None:
        owner, (reader, writer) = Owner(self), self.pipe()
        twin = self.held(os.dup(writer))
        blocks = [bytes([65 + number]) * 9_999 + b"\n" for number in range(20)]
        for number, block in enumerate(blocks):
            owner.sink.write((writer, twin)[number % 2], block)
        self.assertEqual(self.read(reader, 200_000), b"".join(blocks))

    def test_a_file_gets_all_of_it(self) -> None:
        owner, file = Owner(self), self.held(os.memfd_create("output"))
        text = b"line\n" * 100_000 + b"x" * 10_000
        owner.sink.write(file, text)
        self.assertEqual(owner.sink.close(SECONDS), 0)
        self.assertEqual(os.pread(file, len(text) + 1, 0), text)


class BrokenTests(SinkTestCase):
    """A descriptor that takes nothing any more."""

    def test_a_reader_that_has_gone_is_remembered_and_nothing_is_kept_for_it(self) -> None:
        owner, (reader, writer) = Owner(self), self.pipe()
        owner.sink.write(writer, b"x" * (1 << 20))
        self.assertEqual(owner.told, ["pause"])
        self.shut(reader)
        owner.turn()
        owner.turn()
        self.assertEqual(owner.told, ["pause", "broke: Broken pipe", "resume"])
        self.assertEqual({fd: error.errno for fd, error in owner.sink.broken.items()}, {writer: errno.EPIPE})
        for _ in range(100):
            owner.sink.write(writer, b"x" * (1 << 20))
        self.assertEqual(owner.told, ["pause", "broke: Broken pipe", "resume"])
        self.assertEqual(owner.sink.close(SECONDS), 0)

    def test_once_it_is_mended_it_is_tried_again(self) -> None:
        owner, (reader, writer) = Owner(self), self.pipe()
        full = self.held(os.open("/dev/full", os.O_WRONLY))
        for told in (["broke: No space left on device"], ["broke: No space left on device"] * 2):
            owner.sink.write(full, b"lost\n")
            owner.turn()
            owner.sink.write(full, b"dropped\n")
            self.assertEqual(owner.told, told)
            self.assertEqual(list(owner.sink.broken), [full])
            owner.sink.mend()
            self.assertEqual(owner.sink.broken, {})
        # There is room now.
        os.dup2(writer, full)
        owner.sink.write(full, b"heard\n")
        self.assertEqual(self.read(reader, 6), b"heard\n")

    def test_our_own_output_is_not_mended(self) -> None:
        owner = Owner(self)
        error = OSError(errno.EPIPE, "Broken pipe")
        owner.sink.broken = {1: error, 2: error, 9: error}
        owner.sink.mend()
        self.assertEqual(owner.sink.broken, {1: error, 2: error})

    def test_the_others_go_on(self) -> None:
        full = self.held(os.open("/dev/full", os.O_WRONLY))
        owner, (reader, writer) = Owner(self), self.pipe()
        # High, so that nothing else gets the number.
        closed = fcntl.fcntl(writer, fcntl.F_DUPFD, 200)
        os.close(closed)
        for fd in (closed, full, writer):
            owner.sink.write(fd, b"heard\n")
        self.assertEqual(self.read(reader, 6), b"heard\n")
        self.assertEqual(owner.sink.close(SECONDS), 0)
        self.assertEqual(
            {fd: error.errno for fd, error in owner.sink.broken.items()}, {closed: errno.EBADF, full: errno.ENOSPC}
        )


class CloseTests(SinkTestCase):
    """The very end."""

    def test_close_waits_for_what_is_queued(self) -> None:
        owner, (reader, writer) = Owner(self), self.pipe()
        text = b"x" * (1 << 18)
        owner.sink.write(writer, text)
        got: list[bytes] = []
        thread = threading.Thread(target=lambda: got.append(self.read(reader, len(text))))
        thread.start()
        self.assertEqual(owner.sink.close(SECONDS), 0)
        thread.join(SECONDS)
        self.assertEqual(got, [text])

    def test_close_gives_up_in_time_and_then_no_other_write_is_begun(self) -> None:
        owner, (reader, writer) = Owner(self), self.pipe()
        owner.sink.write(writer, b"x" * (1 << 18))
        # All that a pipe takes: from here on nobody takes any.
        deadline = time.monotonic() + SECONDS
        while owner.sink.written < fcntl.fcntl(writer, fcntl.F_GETPIPE_SZ):
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.001)
        left = owner.sink.close(0.05)
        self.assertEqual(left, (1 << 18) - owner.sink.written)
        self.assertGreater(left, 0)
        # The write that waits for room is begun, and no other is.
        self.read(reader, (1 << 18) - left)
        self.join()
        self.assertEqual(owner.sink.close(0), left)
        self.shut(writer)
        self.assertLessEqual(len(self.read(reader, 1 << 18)), 4096)

    def test_a_write_after_close_is_dropped(self) -> None:
        owner, (reader, writer) = Owner(self), self.pipe()
        self.assertEqual(owner.sink.close(0), 0)
        owner.sink.write(writer, b"late\n")
        self.assertEqual(owner.sink.close(SECONDS), 0)
        self.shut(writer)
        self.assertEqual(os.read(reader, 10), b"")

    def test_a_sink_leaves_no_descriptor_open(self) -> None:
        before = os.listdir("/proc/self/fd")
        owner, (reader, writer) = Owner(self), os.pipe()
        owner.sink.write(writer, b"one\n")
        self.assertEqual(owner.sink.close(SECONDS), 0)
        os.close(reader)
        os.close(writer)
        self.assertEqual(os.listdir("/proc/self/fd"), before)
