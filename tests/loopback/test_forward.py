"""Forwarded channels on real sockets: what a direct connection to the backend would give, and nothing left over.

The test holds both far ends itself, so each step is one call on a plain socket.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import random
import select
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from twisted.internet import task
from twisted.internet.defer import Deferred

from flodl_tw import sockets
from flodl_tw.channels.forward import DialerLeg, ForwardFactory
from flodl_tw.channels.front_door import FrontDoor
from flodl_tw.channels.peeker import Peeker
from flodl_tw.core.messages import WorldFormed
from flodl_tw.core.wire import CONTROL_MAGIC, DATA_MAGIC, RENDEZVOUS_MAGIC
from flodl_tw.limits import STOP_GRACE, Limits
from tests.loopback.process import (
    LOOPBACK,
    PATIENT,
    SLOWNESS,
    WAIT,
    ProcessTestCase,
    Twistd,
    ends,
    free_port,
    read_all,
    reset,
    shared,
    until,
)
from tests.waiting import ReactorTestCase, waits

MIB = 1 << 20
TCP_LINGER2 = 8
TCP_REPAIR = 19
CLOSE_WAIT = "08"
SCALE = 0.1
MAGICS = {"rendezvous": RENDEZVOUS_MAGIC, "data": DATA_MAGIC, "control": CONTROL_MAGIC}
BUDGET = 20.0
"""Seconds for what takes 3 by the deadlines at that scale, 2 more by the kernel's own timers, and what the machine is
slow; unscaled it would be 30."""
GROWTH_KIB = 20 * 1024
"""What a stalled forward may cost in memory."""
NO_WORLD = ("--min-rank-start", "1000000", "--target-ranks", "1000000")


def listener(backlog: int = 128, family: int = socket.AF_INET, address: Any = (LOOPBACK, 0)) -> socket.socket:
    """A backend that accepts when the test does."""
    made = socket.socket(family, socket.SOCK_STREAM)
    made.bind(address)
    made.listen(backlog)
    made.settimeout(WAIT)
    return made


def endpoint(backend: socket.socket) -> str:
    """Its description, for an option."""
    if backend.family == socket.AF_UNIX:
        return f"unix:{backend.getsockname()}"
    return f"tcp:{LOOPBACK}:{backend.getsockname()[1]}"


def exactly(sock: socket.socket, count: int) -> bytes:
    """The next ``count`` bytes."""
    parts = bytearray()
    while len(parts) < count:
        part = sock.recv(min(count - len(parts), MIB))
        if not part:
            raise EOFError(f"the end came after {len(parts)} of {count} bytes")
        parts += part
    return bytes(parts)


def quiet(seconds: float, *socks: socket.socket) -> bool:
    """Whether nothing comes on any of the sockets for that long: no byte, no end."""
    return not select.select(socks, [], [], seconds)[0]


def was_reset(sock: socket.socket, seconds: float = WAIT) -> bool:
    """Whether the connection ends with a reset in time; bytes before it don't matter."""
    sock.settimeout(seconds)
    try:
        read_all(sock)
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return False


def push(sock: socket.socket, seconds: float, seed: int = 1) -> tuple[int, str]:
    """Send for so many seconds against a reader that stops: how many bytes were taken, and their digest."""
    block = random.Random(seed).randbytes(MIB)
    digest, taken, at, deadline = hashlib.sha256(), 0, 0, time.monotonic() + seconds
    sock.setblocking(False)
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([], [sock], [], left)[1]:
            break
        try:
            sent = sock.send(block[at : at + 65536])
        except BlockingIOError:
            continue
        digest.update(block[at : at + sent])
        taken, at = taken + sent, (at + sent) % MIB
    sock.settimeout(WAIT)
    return taken, digest.hexdigest()


def fill(socks: list[socket.socket]) -> None:
    """Send on all of these until no one takes more."""
    block = bytes(MIB)
    for sock in socks:
        sock.setblocking(False)
    while ready := select.select([], socks, [], 0.1)[1]:
        for sock in ready:
            with contextlib.suppress(BlockingIOError):
                sock.send(block)
    for sock in socks:
        sock.settimeout(WAIT)


def digest_of(sock: socket.socket, count: int) -> str:
    """The digest of the next ``count`` bytes."""
    digest = hashlib.sha256()
    while count:
        part = sock.recv(min(count, MIB))
        if not part:
            raise EOFError(f"{count} bytes are missing")
        digest.update(part)
        count -= len(part)
    return digest.hexdigest()


def vanish(sock: socket.socket) -> None:
    """Close without a word to the other end, as a host that is switched off; needs privileges."""
    sock.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
    sock.close()


def may_vanish() -> bool:
    """Whether this user can do that."""
    with socket.socket() as trial:
        try:
            trial.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
        except OSError:
            return False
    return True


def close_waits(local: set[int], remote: set[int]) -> int:
    """Connections in CLOSE_WAIT with such a local or such a remote port."""
    found = 0
    for name in ("tcp", "tcp6"):
        for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = row.split()
            here, there = (int(fields[column].rpartition(":")[2], 16) for column in (1, 2))
            found += fields[3] == CLOSE_WAIT and (here in local or there in remote)
    return found


class Forwarder:
    """A controller whose window stays open, and a backend for each channel; control's is a Unix socket.

    Its deadlines end nothing, unless they are scaled to.
    """

    def __init__(self, *options: str, scale: float = PATIENT) -> None:
        self._made = tempfile.TemporaryDirectory(prefix="flodl-tw-")
        self.backends = {
            "rendezvous": listener(),
            "data": listener(),
            "control": listener(family=socket.AF_UNIX, address=f"{self._made.name}/control"),
        }
        named = [word for name, backend in self.backends.items() for word in (f"--{name}", endpoint(backend))]
        self.controller = Twistd(*NO_WORLD, *named, *options, scale=scale).listening()
        self.controller.state()

    def pair(self, name: str = "data", rcvbuf: int = 0) -> tuple[socket.socket, socket.socket]:
        """A dialer and what its backend accepted, with the magic read."""
        dialer = socket.socket()
        if rcvbuf:
            dialer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf)
        dialer.settimeout(WAIT)
        dialer.connect((LOOPBACK, self.controller.port))
        dialer.sendall(MAGICS[name])
        accepted, _ = self.backends[name].accept()
        accepted.settimeout(WAIT)
        assert exactly(accepted, 4) == MAGICS[name]
        return dialer, accepted

    def close(self) -> None:
        self.controller.close()
        for backend in self.backends.values():
            backend.close()
        self._made.cleanup()


class SlowForwarder(Forwarder):
    """With deadlines of a tenth."""

    def __init__(self) -> None:
        super().__init__(scale=SCALE)


class ForwardCase(ProcessTestCase):
    """Tests of one forwarder that they share."""

    kind: Callable[[], Forwarder] = Forwarder

    def setUp(self) -> None:
        self.rig = shared(self, type(self).kind)
        self.controller = self.rig.controller
        self.addCleanup(self.no_traceback, self.controller, len(self.controller.log))

    def pair(self, name: str = "data", **how: Any) -> tuple[socket.socket, socket.socket]:
        """A forwarded connection, closed at the end of the test."""
        dialer, accepted = self.rig.pair(name, **how)
        self.addCleanup(dialer.close)
        self.addCleanup(accepted.close)
        return dialer, accepted


class Bytes(ForwardCase):
    """Every byte arrives, where it should, and so does each kind of end."""

    def test_each_channel_reaches_its_own_backend_magic_included(self) -> None:
        for name, magic in MAGICS.items():
            with self.subTest(name=name):
                dialer = self.connect(self.controller, data=magic + b"hello " + name.encode())
                accepted, _ = self.rig.backends[name].accept()
                self.addCleanup(accepted.close)
                accepted.settimeout(WAIT)
                self.assertEqual(exactly(accepted, 10 + len(name)), magic + b"hello " + name.encode())
                accepted.sendall(b"and back")
                self.assertEqual(exactly(dialer, 8), b"and back")
                self.assertTrue(quiet(0, *self.rig.backends.values()), "another backend was dialed, too")

    def test_a_magic_may_come_byte_by_byte(self) -> None:
        dialer = self.connect(self.controller)
        dialer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in DATA_MAGIC + b"dribbled":
            dialer.sendall(bytes([byte]))
            # The server has read it by the time that it has answered somebody who came later.
            self.controller.state()
        accepted, _ = self.rig.backends["data"].accept()
        self.addCleanup(accepted.close)
        accepted.settimeout(WAIT)
        self.assertEqual(exactly(accepted, 12), DATA_MAGIC + b"dribbled")

    def test_nothing_is_sent_to_a_backend_before_the_magic_is_whole(self) -> None:
        self.connect(self.controller, data=DATA_MAGIC[:3])
        self.controller.state()
        self.assertTrue(quiet(0.1, *self.rig.backends.values()))

    def test_64_mib_come_back_as_they_were_sent(self) -> None:
        for name in ("data", "control"):
            with self.subTest(name=name):
                dialer, accepted = self.pair(name)
                data = random.Random(4).randbytes(64 * MIB)
                before = self.controller.resident_kib()

                def echo(end: socket.socket = accepted) -> None:
                    while part := end.recv(MIB):
                        end.sendall(part)
                    end.shutdown(socket.SHUT_WR)

                def send(end: socket.socket = dialer, data: bytes = data) -> None:
                    sizes, at = random.Random(5), 0
                    while at < len(data):
                        size = sizes.choice((1, 100, 65536, 300_000, MIB))
                        end.sendall(data[at : at + size])
                        at += size
                    end.shutdown(socket.SHUT_WR)

                with working(echo, send):
                    self.assertEqual(digest_of(dialer, len(data)), hashlib.sha256(data).hexdigest())
                    self.assertEqual(dialer.recv(1), b"")
                self.assertLess(self.controller.resident_kib() - before, GROWTH_KIB)

    def test_a_dialer_that_has_sent_its_last_byte_still_gets_its_answer(self) -> None:
        for name in MAGICS:
            with self.subTest(name=name):
                dialer, accepted = self.pair(name)
                question, answer = random.Random(6).randbytes(3_000_001), random.Random(7).randbytes(MIB)
                with working(lambda end=dialer, data=question: (end.sendall(data), end.shutdown(socket.SHUT_WR))):
                    self.assertEqual(hashlib.sha256(read_all(accepted)).digest(), hashlib.sha256(question).digest())
                # It thinks for a while, and nobody takes that for an end.
                self.assertTrue(quiet(0.5, dialer))
                with working(lambda end=accepted, data=answer: (end.sendall(data), end.close())):
                    self.assertEqual(hashlib.sha256(read_all(dialer)).digest(), hashlib.sha256(answer).digest())

    def test_a_backend_that_has_sent_its_last_byte_is_still_sent_to(self) -> None:
        for name in MAGICS:
            with self.subTest(name=name):
                dialer, accepted = self.pair(name)
                accepted.sendall(b"all that I have to say")
                accepted.shutdown(socket.SHUT_WR)
                self.assertEqual(read_all(dialer), b"all that I have to say")
                self.assertTrue(quiet(0.2, accepted))
                data = random.Random(8).randbytes(500_000)
                with working(lambda end=dialer, data=data: (end.sendall(data), end.close())):
                    self.assertEqual(hashlib.sha256(read_all(accepted)).digest(), hashlib.sha256(data).digest())

    def test_the_end_of_a_download_comes_with_its_last_byte(self) -> None:
        dialer, accepted = self.pair()
        with working(lambda: (accepted.sendall(bytes(5 * MIB)), accepted.close())):
            exactly(dialer, 5 * MIB)
            self.assertEqual(dialer.recv(1), b"")

    def test_a_pair_that_both_ends_have_closed_leaves_no_descriptor(self) -> None:
        before = self.controller.descriptors()
        for first in (0, 1):
            ends_of_it = self.pair()
            ends_of_it[first].shutdown(socket.SHUT_WR)
            self.assertEqual(ends_of_it[1 - first].recv(1), b"")
            ends_of_it[1 - first].close()
            self.assertEqual(ends_of_it[first].recv(1), b"")
        until(lambda: self.controller.descriptors() <= before, "the descriptors of the closed")


@contextlib.contextmanager
def working(*bodies: Callable[[], object]) -> Iterator[None]:
    """Run these in threads beside the body; their failures count."""
    failures: list[BaseException] = []

    def run(body: Callable[[], object]) -> None:
        try:
            body()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(WAIT)
    if failures:
        raise failures[0]


class Resets(ForwardCase):
    """A reset is a reset, whatever came before it."""

    def test_a_reset_by_the_dialer_reaches_the_backend(self) -> None:
        dialer, accepted = self.pair()
        reset(dialer)
        self.assertTrue(was_reset(accepted))

    def test_a_reset_by_the_backend_reaches_the_dialer(self) -> None:
        dialer, accepted = self.pair()
        reset(accepted)
        self.assertTrue(was_reset(dialer))

    def test_a_reset_by_a_dialer_ends_a_connection_to_a_unix_socket(self) -> None:
        dialer, accepted = self.pair("control")
        reset(dialer)
        self.assertTrue(ends(accepted))

    def test_a_dialer_that_shut_its_side_and_then_resets_reaches_the_backend(self) -> None:
        # The backend is at work on its answer, and has nothing to send yet.
        dialer, accepted = self.pair()
        dialer.shutdown(socket.SHUT_WR)
        self.assertEqual(accepted.recv(1), b"")
        reset(dialer)
        self.assertTrue(gone_by_reset(accepted))

    def test_a_backend_that_shut_its_side_and_then_resets_reaches_the_dialer(self) -> None:
        dialer, accepted = self.pair()
        accepted.shutdown(socket.SHUT_WR)
        self.assertEqual(dialer.recv(1), b"")
        reset(accepted)
        self.assertTrue(gone_by_reset(dialer))

    def test_an_end_that_closed_both_ways_is_known_by_the_next_byte_for_it(self) -> None:
        dialer, accepted = self.pair()
        dialer.close()
        self.assertEqual(accepted.recv(1), b"")
        accepted.sendall(b"an answer that nobody waits for")
        self.assertTrue(gone_by_reset(accepted))

    def test_a_dialer_that_resets_with_bytes_on_their_way_is_known_once_the_backend_reads(self) -> None:
        dialer, accepted = self.pair()
        push(dialer, 0.5)
        reset(dialer)
        self.assertTrue(was_reset(accepted))

    def test_a_dialer_that_resets_while_the_backend_does_not_read_is_known_at_once(self) -> None:
        dialer, accepted = self.pair()
        push(dialer, 0.5)
        reset(dialer)
        self.assertTrue(gone_by_reset(accepted))

    def test_a_backend_that_resets_while_the_dialer_does_not_read_is_known_at_once(self) -> None:
        dialer, accepted = self.pair()
        push(accepted, 0.5)
        reset(accepted)
        self.assertTrue(gone_by_reset(dialer))


def gone_by_reset(sock: socket.socket, seconds: float = WAIT) -> bool:
    """Whether a connection whose end of stream was read already is reset in time."""
    watch = select.poll()
    # POLLERR is reported unasked; the end of the stream, which stays readable, is not asked for.
    watch.register(sock, 0)
    return any(event & select.POLLERR for _, event in watch.poll(seconds * 1000))


class BackPressure(ForwardCase):
    """A reader that stops stops its sender, and costs the controller no memory."""

    def test_a_backend_that_stops_reading_slows_its_dialer_and_gets_all_in_the_end(self) -> None:
        dialer, accepted = self.pair()
        before = self.controller.resident_kib()
        taken, digest = push(dialer, 1.5)
        self.assertLess(self.controller.resident_kib() - before, GROWTH_KIB)
        self.assertGreater(taken, 0)
        self.assertEqual(digest_of(accepted, taken), digest)
        accepted.sendall(b"and now?")
        self.assertEqual(exactly(dialer, 8), b"and now?")

    def test_a_dialer_that_stops_reading_slows_its_backend_and_gets_all_in_the_end(self) -> None:
        dialer, accepted = self.pair()
        before = self.controller.resident_kib()
        taken, digest = push(accepted, 1.5)
        self.assertLess(self.controller.resident_kib() - before, GROWTH_KIB)
        self.assertGreater(taken, 0)
        accepted.close()
        self.assertEqual(digest_of(dialer, taken), digest)
        self.assertEqual(dialer.recv(1), b"")

    def test_both_directions_may_be_stalled_and_go_on(self) -> None:
        dialer, accepted = self.pair()
        up, up_digest = push(dialer, 0.5, seed=2)
        down, down_digest = push(accepted, 0.5, seed=3)
        self.assertEqual(digest_of(dialer, down), down_digest)
        self.assertEqual(digest_of(accepted, up), up_digest)

    def test_256_mib_through_a_forward_leave_nothing_in_memory(self) -> None:
        dialer, accepted = self.pair()
        before = self.controller.resident_kib()
        block = bytes(MIB)
        with working(lambda: [dialer.sendall(block) for _ in range(256)]):
            left = 256 * MIB
            buffer = bytearray(MIB)
            while left:
                left -= accepted.recv_into(buffer, min(left, MIB))
        self.assertLess(self.controller.resident_kib() - before, GROWTH_KIB)

    def test_joins_and_requests_beside_heavy_forwards_are_answered_promptly(self) -> None:
        stop = threading.Event()
        block = bytes(MIB)

        def send(end: socket.socket) -> None:
            while not stop.is_set():
                end.sendall(block)
            end.close()

        def sink(end: socket.socket) -> None:
            buffer = bytearray(MIB)
            while end.recv_into(buffer):
                pass

        pairs = [self.pair() for _ in range(3)]
        bodies = [lambda end=dialer: send(end) for dialer, _ in pairs]
        bodies += [lambda end=accepted: sink(end) for _, accepted in pairs]
        longest = 0.0
        with working(*bodies):
            try:
                for number in range(20):
                    begun = time.monotonic()
                    self.controller.state()
                    host = self.joined(self.controller, f"beside-{number}")
                    longest = max(longest, time.monotonic() - begun)
                    host.close()
            finally:
                stop.set()
        self.assertLess(longest, SLOWNESS)


class KilledBackends(ForwardCase):
    """A backend dies under clients that stall: nothing of the pair is left once the client has closed."""

    batches, at_once = 2, 20

    def check(self, killed: Callable[[socket.socket], None], stalled: Callable[[list[Any]], None]) -> None:
        """Stall, kill, close, forty times (there are five kinds), and then no descriptor and no CLOSE_WAIT."""
        before = self.controller.descriptors()
        for _ in range(self.batches):
            pairs = [self.rig.pair(rcvbuf=4096) for _ in range(self.at_once)]
            stalled(pairs)
            for _, accepted in pairs:
                killed(accepted)
            # The server has seen the deaths; then the clients go.
            self.controller.state()
            for dialer, _ in pairs:
                dialer.close()
        until(lambda: self.controller.descriptors() <= before, "the descriptors of the dead")
        port = self.rig.backends["data"].getsockname()[1]
        self.assertEqual(close_waits({self.controller.port}, {port}), 0)

    @staticmethod
    def clients_send(pairs: list[Any]) -> None:
        fill([dialer for dialer, _ in pairs])

    @staticmethod
    def backends_send(pairs: list[Any]) -> None:
        fill([accepted for _, accepted in pairs])

    @staticmethod
    def nobody_sends(pairs: list[Any]) -> None:
        pass

    def test_by_a_reset_while_clients_send_without_reading(self) -> None:
        self.check(reset, self.clients_send)

    def test_by_a_close_while_clients_send_without_reading(self) -> None:
        self.check(socket.socket.close, self.clients_send)

    def test_by_a_reset_while_clients_read_nothing(self) -> None:
        self.check(reset, self.backends_send)

    def test_by_a_close_while_clients_read_nothing(self) -> None:
        self.check(socket.socket.close, self.backends_send)

    def test_by_a_close_while_nobody_sends(self) -> None:
        self.check(socket.socket.close, self.nobody_sends)


class LongIdle(SlowForwarder):
    """Pairs of several kinds, looked at after longer than any deadline at this scale."""

    def __init__(self) -> None:
        super().__init__()
        # The longest: keepalive 1 s + 3 x 1 s, a stalled write 3 s; the native rendezvous is not in use.
        self.idle = [self.pair(name) for name in MAGICS]
        self.shut = [self.pair() for _ in range(2)]
        for number, pair in enumerate(self.shut):
            pair[number].shutdown(socket.SHUT_WR)
            assert pair[1 - number].recv(1) == b""
        self.stalled = self.pair()
        push(self.stalled[0], 0.3)
        waiting = [self.shut[0][0], self.shut[1][1], *(end for pair in self.idle for end in pair)]
        self.were_quiet = quiet(6.2, *waiting)

    def close(self) -> None:
        for pair in (*self.idle, *self.shut, self.stalled):
            for end in pair:
                end.close()
        super().close()


class Idle(ForwardCase):
    """Nobody ends a forward but its ends."""

    kind = LongIdle
    rig: LongIdle

    def test_an_idle_forward_outlives_every_deadline(self) -> None:
        self.assertTrue(self.rig.were_quiet)
        for dialer, accepted in self.rig.idle:
            dialer.sendall(b"still there?")
            self.assertEqual(exactly(accepted, 12), b"still there?")
            accepted.sendall(b"yes")
            self.assertEqual(exactly(dialer, 3), b"yes")

    def test_a_half_closed_forward_does_too(self) -> None:
        (shut, accepted), (dialer, shut_backend) = self.rig.shut
        accepted.sendall(b"late answer")
        accepted.close()
        self.assertEqual(read_all(shut), b"late answer")
        dialer.sendall(b"late question")
        dialer.close()
        self.assertEqual(read_all(shut_backend), b"late question")

    def test_a_write_that_makes_no_progress_for_its_deadline_ends_the_forward_at_both_ends(self) -> None:
        # The table of deadlines has it so; idleness has none, and a reader that is slow makes progress.
        dialer, accepted = self.rig.stalled
        self.assertTrue(gone_by_reset(dialer, BUDGET))
        # Linux gives a connection up without a word, so the reader is told when it reads on.
        self.assertTrue(was_reset(accepted))


class DeadEnds(ForwardCase):
    """An end that is gone without a word is found by keepalive, on either leg."""

    kind = SlowForwarder

    def vanishing(self) -> tuple[socket.socket, socket.socket]:
        """A pair; skips where this user may not close a socket in silence."""
        if not may_vanish():
            self.skipTest("closing a socket in silence needs more rights than this user has")
        return self.pair()

    def test_a_dialer_that_vanished(self) -> None:
        dialer, accepted = self.vanishing()
        vanish(dialer)
        self.assertTrue(was_reset(accepted, BUDGET))

    def test_a_backend_that_vanished(self) -> None:
        dialer, accepted = self.vanishing()
        vanish(accepted)
        self.assertTrue(was_reset(dialer, BUDGET))

    def test_a_dialer_that_closed_and_is_gone_while_its_backend_says_nothing(self) -> None:
        # A close looks like a half-close at first; a second later its kernel has forgotten the connection.
        dialer, accepted = self.pair()
        dialer.setsockopt(socket.IPPROTO_TCP, TCP_LINGER2, 1)
        dialer.close()
        self.assertEqual(accepted.recv(1), b"")
        self.assertTrue(gone_by_reset(accepted, BUDGET))


class NoBackend(ProcessTestCase):
    """A backend that refuses, or that does not answer."""

    def full(self) -> socket.socket:
        """A backend whose queue is full: who dials it gets no answer."""
        backend = listener(0)
        self.addCleanup(backend.close)
        self.fillers = []
        for _ in range(3):
            filler = socket.socket()
            filler.setblocking(False)
            self.assertEqual(filler.connect_ex(backend.getsockname()), errno.EINPROGRESS)
            self.addCleanup(filler.close)
            self.fillers.append(filler)
        self.assertEqual(len(select.select([], self.fillers, [], 0.1)[1]), 1, "the queue is no queue of one")
        return backend

    def drained(self, backend: socket.socket) -> None:
        """Let go of the fillers."""
        for filler in self.fillers:
            filler.close()
        accepted, _ = backend.accept()
        accepted.close()

    def test_a_refused_dial_is_reset_and_a_line_says_so_once(self) -> None:
        nowhere = f"unix:{tempfile.gettempdir()}/flodl-tw-there-is-no-such-socket"
        controller = self.start("--data", f"tcp:{LOOPBACK}:{free_port()}", "--control", nowhere, scale=PATIENT)
        for magic in (DATA_MAGIC, CONTROL_MAGIC):
            for _ in range(5):
                self.assertTrue(was_reset(self.connect(controller, data=magic + b"first bytes")))
        controller.said(f"backend {nowhere} ")
        lines = [line for line in controller.log.splitlines() if "cannot be reached" in line]
        self.assertEqual(len(lines), 2, lines)
        self.assertIn("the data channel's backend tcp:127.0.0.1:", lines[0])
        self.assertIn("refused", lines[0])
        self.assertIn(f"the control channel's backend {nowhere} ", lines[1])
        self.assertIn("No such file", lines[1])

    def test_a_backend_that_does_not_answer_costs_its_deadline(self) -> None:
        backend = self.full()
        controller = self.start("--data", endpoint(backend), scale=SCALE)
        controller.state()
        before = controller.descriptors()
        begun = time.monotonic()
        self.assertTrue(was_reset(self.connect(controller, data=DATA_MAGIC)))
        self.assertGreater(time.monotonic() - begun, 0.9)
        # Unscaled it would be 5 s.
        self.assertLess(time.monotonic() - begun, 5)
        line = controller.said("cannot be reached")
        # For people, and so no object's name.
        self.assertNotIn("Address(", line)
        self.assertNotIn("()", line)
        self.assertIn("1 s", line)
        until(lambda: controller.descriptors() <= before, "the descriptors of the attempt")

    def test_what_comes_before_the_backend_is_there_waits_in_the_kernel(self) -> None:
        backend = self.full()
        controller = self.start("--data", endpoint(backend), scale=PATIENT)
        controller.state()
        before = controller.resident_kib()
        dialer = self.connect(controller, data=DATA_MAGIC)
        taken, digest = push(dialer, 0.5)
        dialer.shutdown(socket.SHUT_WR)
        self.assertGreater(taken, 100_000)
        self.assertLess(controller.resident_kib() - before, 2048)
        self.drained(backend)
        while True:
            accepted, _ = backend.accept()
            self.addCleanup(accepted.close)
            accepted.settimeout(WAIT)
            # A filler that got through late says nothing.
            if accepted.recv(4) == DATA_MAGIC:
                break
        self.assertEqual(digest_of(accepted, taken), digest)
        # So does the end that it sent after them; its own side still works.
        self.assertEqual(accepted.recv(1), b"")
        accepted.sendall(b"answer")
        accepted.close()
        self.assertEqual(read_all(dialer), b"answer")

    def test_dialers_that_leave_while_the_backend_does_not_answer_leave_nothing(self) -> None:
        backend = self.full()
        controller = self.start("--data", endpoint(backend), scale=SCALE)
        controller.state()
        before = controller.descriptors()
        for number in range(40):
            dialer = self.connect(controller, data=DATA_MAGIC + b"x" * 1000)
            controller.state()
            (reset if number % 2 else socket.socket.close)(dialer)
        until(lambda: controller.descriptors() <= before, "the descriptors of those who left")
        self.assertEqual(close_waits({controller.port}, {backend.getsockname()[1]}), 0)

    def test_a_unix_socket_whose_queue_is_full_costs_the_deadline_and_no_work(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="flodl-tw-")
        self.addCleanup(folder.cleanup)
        backend = listener(0, socket.AF_UNIX, f"{folder.name}/full")
        self.addCleanup(backend.close)
        filler = socket.socket(socket.AF_UNIX)
        self.addCleanup(filler.close)
        filler.connect(backend.getsockname())
        controller = self.start("--data", endpoint(backend), scale=SCALE)
        controller.state()
        before = controller.descriptors()
        for _ in range(5):
            self.assertTrue(was_reset(self.connect(controller, data=DATA_MAGIC)))
        controller.said("cannot be reached")
        self.assertEqual(controller.log.count("cannot be reached"), 1)
        until(lambda: controller.descriptors() <= before, "the descriptors of the attempts")

    def test_sigterm_while_a_backend_does_not_answer_is_the_end_within_the_grace(self) -> None:
        backend = self.full()
        controller = self.start("--data", endpoint(backend), scale=PATIENT)
        for _ in range(3):
            self.connect(controller, data=DATA_MAGIC)
        controller.state()
        begun = time.monotonic()
        self.assertEqual(controller.stop(signal.SIGTERM), -signal.SIGTERM)
        self.assertLess(time.monotonic() - begun, STOP_GRACE + SLOWNESS)

    def test_a_channel_without_a_backend_is_closed_and_the_log_names_it(self) -> None:
        controller = self.start("--rendezvous", "off")
        for number, (name, magic) in enumerate(MAGICS.items(), 2):
            # Lines of a kind from one address are counted after the first.
            source = (f"127.0.0.{number}", 0)
            with (
                self.subTest(name=name),
                socket.create_connection((LOOPBACK, controller.port), WAIT, source_address=source) as client,
            ):
                client.sendall(magic)
                self.assertTrue(ends(client))
                controller.said(f"nothing serves the {name} channel in this run")


class Stopping(ProcessTestCase):
    """SIGTERM does not wait for those that stall."""

    def test_stalled_forwards_do_not_hold_the_process(self) -> None:
        rig = Forwarder()
        self.addCleanup(rig.close)
        pairs = [rig.pair(name) for name in ("data", "control", "rendezvous") for _ in range(2)]
        for pair in pairs:
            for end in pair:
                self.addCleanup(end.close)
        fill([pair[number % 2] for number, pair in enumerate(pairs)])
        idle = rig.pair()
        for end in idle:
            self.addCleanup(end.close)
        begun = time.monotonic()
        self.assertEqual(rig.controller.stop(signal.SIGTERM), -signal.SIGTERM)
        self.assertLess(time.monotonic() - begun, STOP_GRACE + SLOWNESS)
        self.no_traceback(rig.controller)
        for end in idle:
            self.assertTrue(ends(end))


class RelaySpecs(ProcessTestCase):
    """What a host is told for its relay, and which salt its ranks get."""

    def formed(self, *options: str) -> tuple[Twistd, dict[str, Any], dict[str, Any] | None, str]:
        """The controller, the envelope, the relay's spec and the session salt of a world of one host."""
        controller = self.start("--target-ranks", "2", *options)
        host = self.joined(controller, "gpu-a", 2)
        world = host.next()
        assert isinstance(world, WorldFormed)
        assert host.talk.envelope is not None
        assert host.talk.salt is not None
        spec = None if world.relay_spec_hex is None else json.loads(bytes.fromhex(world.relay_spec_hex))
        return controller, host.talk.envelope, spec, host.talk.salt.hex()

    def test_a_control_backend_makes_a_relay(self) -> None:
        some = f"tcp:{LOOPBACK}:{free_port()}"
        for options, data, ceiling in (
            ((), False, 1073741824),
            (("--data", some, "--frame-ceiling", "65536"), True, 65536),
        ):
            with self.subTest(options=options):
                controller, envelope, spec, session = self.formed("--control", some, *options)
                self.assertEqual(
                    spec,
                    {
                        "host": "gpu-a",
                        "controller_host": LOOPBACK,
                        "controller_port": controller.port,
                        "ranks": [0, 1],
                        "salt_hex": session,
                        "world_size": 2,
                        "data_channel": data,
                        "frame_ceiling_bytes": ceiling,
                    },
                )
                self.assertEqual(envelope["salt"], session)
                self.assertNotIn(session, controller.log)

    def test_a_data_or_rendezvous_backend_alone_shares_the_salt_and_makes_no_relay(self) -> None:
        for option in ("--data", "--rendezvous"):
            with self.subTest(option=option):
                _, envelope, spec, session = self.formed(option, f"tcp:{LOOPBACK}:{free_port()}")
                self.assertIsNone(spec)
                self.assertEqual(envelope["salt"], session)

    def test_without_a_backend_the_ranks_salt_is_the_worlds_own(self) -> None:
        _, envelope, spec, session = self.formed()
        self.assertIsNone(spec)
        self.assertRegex(envelope["salt"], r"\A[0-9a-f]{32}\Z")
        self.assertNotEqual(envelope["salt"], session)


class Legs(ReactorTestCase):
    """What Linux is told about the two sockets of a forward."""

    @waits
    async def test_both_legs_have_keepalive_and_a_limit_on_stalled_writes(self) -> None:
        from twisted.internet import reactor

        running: Any = reactor
        limits = Limits.at(SCALE)
        backend = listener()
        self.addCleanup(backend.close)
        front = FrontDoor(running, limits)
        legs: list[DialerLeg] = []

        class Kept(ForwardFactory):
            def buildProtocol(self, peeker: Peeker) -> DialerLeg:
                legs.append(super().buildProtocol(peeker))
                return legs[-1]

        front.routes = {DATA_MAGIC: Kept(front, running, "data", endpoint(backend))}
        bound = sockets.listen(LOOPBACK, 0, limits)
        port = running.adoptStreamPort(bound.fileno(), bound.family, front)
        bound.close()
        with socket.create_connection((LOOPBACK, port.getHost().port)) as dialer:
            dialer.sendall(DATA_MAGIC)
            while quiet(0, backend):
                await turn(running)
            accepted, _ = backend.accept()
            self.addCleanup(accepted.close)
            while quiet(0, accepted):
                await turn(running)
            (leg,) = legs
            for end, transport in (("dialer", leg.transport), ("backend", leg.other.transport)):
                handle = transport.getHandle()
                self.assertEqual(handle.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), 1, end)
                for option, value in (
                    (socket.TCP_NODELAY, 1),
                    (socket.TCP_KEEPIDLE, 1),
                    (socket.TCP_KEEPINTVL, 1),
                    (socket.TCP_KEEPCNT, 3),
                    (socket.TCP_USER_TIMEOUT, 3000),
                ):
                    self.assertEqual(handle.getsockopt(socket.IPPROTO_TCP, option), value, (end, option))
        gone = front.close_all()
        await port.stopListening()
        await gone


def turn(clock: Any) -> Deferred[None]:
    """A turn of the reactor."""
    return task.deferLater(clock, 0.001)
