"""The store over real sockets: large values, clients that do not read, a scan, the next run, and its end."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from flodl_tw.core.messages import Abort, WorldFormed
from flodl_tw.core.store.wire import Opcode
from flodl_tw.limits import STOP_GRACE
from tests.core.store.queries import HELLO, i64, many, q, text
from tests.loopback.agents import PYTHON, AgentTestCase
from tests.loopback.process import (
    LOOPBACK,
    PATIENT,
    SLOWNESS,
    WAIT,
    Client,
    ProcessTestCase,
    Twistd,
    body_of,
    ends,
    until,
)

MIB = 1 << 20
VALUE = bytes(range(256)) * (8 * MIB // 256)
"""As large as a value may be."""
PING = b"\x0d\1\2\3\4"
PONG = b"\1\2\3\4"
POST = b"POST /abort HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
NOISE = (
    b"SSH-2.0-scan\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET / HTTP/1.0\r\n\r\n",
    b"\0" * 64,
    b"\3\5\0\0\0\0\0\0\0init/\1\0\0\0\0\0\0\0",
    HELLO[:4] + b"scan",
    HELLO + b"\xff" * 64,
    HELLO + b"\1" + i64(-1),
    HELLO + b"\6" + i64(1 << 40),
    HELLO,
    HELLO[:3],
    b"",
)
# Leaves an exception where torch's @record would, and what it found there.
DIES = """
import json, os, stat, sys
path = os.environ["TORCHELASTIC_ERROR_FILE"]
folder = os.path.dirname(path)
stack = 'Traceback (most recent call last):\\n  File "train.py", line 12, in main\\n    load(7)\\nValueError: no'
extra = {"py_callstack": stack, "timestamp": "1"}
told = {"message": {"message": "ValueError: no such shard: 7", "extraInfo": extra}}
with open(path, "w") as file:
    json.dump(told, file)
with open(sys.argv[1], "w") as file:
    json.dump([path, stat.S_IMODE(os.stat(folder).st_mode)], file)
sys.exit(3)
"""
REASON = "exited with code 3 (ValueError: no such shard: 7, at train.py:12 in main: load(7))"


class BlockingClient:
    """A client of the store, blocking; ``buffer`` is the size of its receive buffer."""

    def __init__(self, port: int, buffer: int | None = None) -> None:
        self.socket = socket.socket()
        if buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        self.socket.settimeout(WAIT)
        self.socket.connect((LOOPBACK, port))
        self.socket.sendall(HELLO)

    def read(self, count: int) -> bytes:
        """So many bytes; EOFError where the stream ends before."""
        data = bytearray()
        while len(data) < count:
            part = self.socket.recv(min(MIB, count - len(data)))
            if not part:
                raise EOFError(f"{len(data)} of {count} bytes")
            data += part
        return bytes(data)

    def ask(self, query: bytes, size: int = 0) -> bytes:
        """Send it; gives an answer of ``size`` bytes, or of a value where that is 0."""
        self.socket.sendall(query)
        return self.read(size) if size else self.read(struct.unpack("<Q", self.read(8))[0])

    def close(self) -> None:
        self.socket.close()


class StoreTestCase(ProcessTestCase):
    """A world of one host on loopback."""

    def formed(self, *options: str) -> Twistd:
        controller = self.start("--target-ranks", "1", "--after-run", "hold", *options, scale=PATIENT)
        self.host = self.world(controller)
        return controller

    def world(self, controller: Twistd) -> Client:
        host = self.joined(controller, "gpu-a")
        self.assertIsInstance(host.next(), WorldFormed)
        return host

    def client(self, controller: Twistd, buffer: int | None = None) -> BlockingClient:
        client = BlockingClient(controller.port, buffer)
        self.addCleanup(client.close)
        return client

    def view(self, controller: Twistd) -> dict[str, Any]:
        view: dict[str, Any] = json.loads(body_of(controller.http(b"GET /store.json HTTP/1.0\r\n\r\n")))["store"]
        return view


class Values(StoreTestCase):
    """Values of any size."""

    def test_a_value_of_8_mib_comes_back_and_one_byte_more_ends_its_client_alone(self) -> None:
        controller = self.formed()
        writer, reader = self.client(controller), self.client(controller)
        reader.socket.sendall(many(Opcode.WAIT, b"/big"))
        writer.socket.sendall(q(Opcode.SET, b"/big", VALUE))
        self.assertEqual(reader.read(1), b"\0")
        self.assertEqual(reader.ask(q(Opcode.GET, b"/big")), VALUE)
        writer.socket.sendall(b"\1" + text(b"/more") + i64(len(VALUE) + 1))
        self.assertTrue(ends(writer.socket))
        controller.said("on the store channel: a value of 8388609 bytes is over the limit of 8388608")
        self.assertEqual(reader.ask(q(Opcode.GETNUMKEYS), 8), i64(1))
        self.assertEqual(self.view(controller)["connected"], 1)

    def test_what_all_may_hold_is_an_option(self) -> None:
        controller = self.formed("--store-max-bytes", str(20 * MIB), "--store-max-keys", "3")
        client = self.client(controller)
        for number in (1, 2):
            client.socket.sendall(q(Opcode.SET, b"/%d" % number, VALUE))
        self.assertEqual(client.ask(PING, 4), PONG)
        # It is closed as soon as the cap is reached, which may be in the middle of this.
        with suppress(BrokenPipeError, ConnectionResetError):
            client.socket.sendall(q(Opcode.SET, b"/3", VALUE))
        self.assertTrue(ends(client.socket))
        controller.said("over the store's limit of 20971520 (--store-max-bytes)")
        other = self.client(controller)
        self.assertEqual(other.ask(q(Opcode.GETNUMKEYS), 8), i64(2))
        other.socket.sendall(q(Opcode.SET, b"/3", b"") + q(Opcode.SET, b"/4", b""))
        self.assertTrue(ends(other.socket))
        controller.said("the store holds all of the 3 keys it may (--store-max-keys)")


class SlowReader(StoreTestCase):
    """A client that does not read."""

    def test_it_is_paused_costs_little_holds_nobody_up_and_loses_nothing(self) -> None:
        controller = self.formed()
        other = self.client(controller)
        other.socket.sendall(q(Opcode.SET, b"/big", VALUE))
        self.assertEqual(other.ask(PING, 4), PONG)
        before = controller.resident_kib()
        slow = self.client(controller, 8192)
        asked = 40
        slow.socket.sendall(q(Opcode.GET, b"/big") * asked)
        # It goes on asking, until nobody takes its questions any more.
        slow.socket.settimeout(0.5)
        pings = 0
        block = PING * 4096
        left = memoryview(b"")
        with self.assertRaises(TimeoutError):
            while True:
                left = memoryview(block)
                while left:
                    left = left[slow.socket.send(left) :]
                pings += 4096
                self.assertLess(pings * len(PING), 64 * MIB)
        for _ in range(100):
            self.assertEqual(other.ask(PING, 4), PONG)
        self.assertLess(controller.resident_kib() - before, 48 * 1024)
        slow.socket.settimeout(WAIT)
        for _ in range(asked):
            self.assertEqual(slow.read(8 + len(VALUE)), text(VALUE))
        self.assertEqual(slow.read(pings * 4), PONG * pings)
        slow.socket.sendall(left)
        rest = (len(block) // len(PING)) * 4
        self.assertEqual(slow.read(rest), PONG * (rest // 4))
        self.assertEqual(slow.ask(q(Opcode.GETNUMKEYS), 8), i64(1))

    def test_one_that_goes_away_amid_its_answer_leaves_nothing(self) -> None:
        controller = self.formed()
        other = self.client(controller)
        other.socket.sendall(q(Opcode.SET, b"/big", VALUE))
        slow = self.client(controller, 8192)
        slow.socket.sendall(q(Opcode.GET, b"/big") * 5)
        until(lambda: self.view(controller)["connected"] == 2, "two clients")
        slow.close()
        until(lambda: self.view(controller)["connected"] == 1, "one client")
        self.assertEqual(other.ask(PING, 4), PONG)


class Runs(StoreTestCase):
    """What runs, scans and ends do to the store."""

    def test_a_scan_during_training_disturbs_nobody(self) -> None:
        controller = self.formed()
        client = self.client(controller)
        client.socket.sendall(q(Opcode.SET, b"/k", b"v") + many(Opcode.WAIT, b"/later"))
        scans = [self.connect(controller, data=noise) for noise in NOISE for _ in range(5)]
        for scan in scans[::2]:
            scan.close()
        self.assertEqual(client.ask(q(Opcode.GET, b"/k")), b"v")
        other = self.client(controller)
        other.socket.sendall(q(Opcode.SET, b"/later", b""))
        self.assertEqual(client.read(1), b"\0")
        self.assertEqual(controller.state()["phase"], "training")
        self.assertEqual(self.view(controller)["keys"], 2)
        self.host.exit_all()
        self.host.close()
        controller.state_is(phase="done")

    def test_the_next_run_sees_no_key_and_open_connections_keep_theirs(self) -> None:
        controller = self.start("--target-ranks", "1", "--after-run", "rearm")
        host = self.world(controller)
        old = self.client(controller)
        old.socket.sendall(q(Opcode.SET, b"/k", b"old"))
        self.assertEqual(old.ask(q(Opcode.GETNUMKEYS), 8), i64(1))
        host.exit_all()
        host.close()
        controller.state_is(phase="waiting")
        self.assertTrue(ends(self.client(controller).socket))
        controller.said("on the store channel: no world has formed yet")
        self.world(controller)
        new = self.client(controller)
        self.assertEqual(new.ask(q(Opcode.GETNUMKEYS), 8), i64(0))
        new.socket.sendall(q(Opcode.SET, b"/k", b"new"))
        self.assertEqual(new.ask(q(Opcode.GET, b"/k")), b"new")
        self.assertEqual(old.ask(q(Opcode.GET, b"/k")), b"old")

    def test_after_an_abort_nobody_is_let_in_and_who_waits_is_left_alone(self) -> None:
        controller = self.formed()
        client = self.client(controller)
        client.socket.sendall(many(Opcode.WAIT, b"/k"))
        until(lambda: self.view(controller)["waiting"], "a wait")
        controller.http(POST)
        (abort,) = self.host.rest()
        self.assertIsInstance(abort, Abort)
        self.host.close()
        controller.state_is(phase="failed")
        self.assertTrue(ends(self.client(controller).socket))
        self.assertEqual(client.ask(PING, 4), PONG)

    def test_it_ends_in_time_with_clients_that_wait_and_that_do_not_read(self) -> None:
        controller = self.formed()
        waiting = self.client(controller)
        waiting.socket.sendall(many(Opcode.WAIT, b"/k"))
        slow = self.client(controller, 8192)
        slow.socket.sendall(q(Opcode.SET, b"/big", VALUE) + q(Opcode.GET, b"/big") * 5)
        until(lambda: self.view(controller)["keys"] == 1, "a key")
        begun = time.monotonic()
        self.assertEqual(controller.stop(signal.SIGTERM), -signal.SIGTERM)
        self.assertLess(time.monotonic() - begun, STOP_GRACE + SLOWNESS)
        self.assertTrue(ends(waiting.socket))

    def test_off_is_off(self) -> None:
        controller = self.formed("--store", "off")
        self.assertTrue(ends(self.client(controller).socket))
        controller.said("nothing serves the store channel in this run")


class Exceptions(AgentTestCase):
    """What a rank died of, from its error file to the operator."""

    def test_it_reaches_every_host_the_operator_and_the_status_and_its_file_is_gone(self) -> None:
        controller = self.start("--target-ranks", "2", "--after-run", "hold")
        other = self.joined(controller, "gpu-b")
        told = self.folder() / "told"
        agent = self.join(controller.port, "gpu-a", program=(*PYTHON, DIES, str(told)))
        self.assertIsInstance(other.next(), WorldFormed)
        abort = other.next()
        assert isinstance(abort, Abort)
        self.assertTrue(abort.reason.endswith(f"of host 'gpu-a' {REASON}"), abort.reason)
        agent.said("left an exception: ValueError: no such shard: 7, at train.py:12 in main: load(7)")
        self.assertEqual(agent.ended(), 3)
        path, mode = json.loads(told.read_text())
        self.assertEqual(mode, 0o700)
        self.assertFalse(Path(path).parent.exists())
        body = json.loads(body_of(controller.http(b"GET /run.json HTTP/1.0\r\n\r\n")))
        self.assertEqual(body["failure"], abort.reason)
        self.assertEqual([error["type"] for error in body["rank_errors"]], ["ValueError"])
        status = self.command("status", f"{LOOPBACK}:{controller.port}")
        self.assertEqual(status.ended(), 0)
        printed = status.out.decode()
        self.assertIn(f"failed: {abort.reason}.\n", printed)
        self.assertIn(": ValueError: no such shard: 7, at train.py:12 in main: load(7)\n", printed)

    def test_a_controller_that_does_not_say_so_gets_no_report_and_a_rank_no_file(self) -> None:
        launcher = self.launcher()
        told = self.folder() / "told"
        say = (
            "import os, sys\n"
            "open(sys.argv[1], 'w').write(os.environ.get('TORCHELASTIC_ERROR_FILE', 'none'))\n"
            "sys.exit(3)"
        )
        environ = {"TORCHELASTIC_ERROR_FILE": os.devnull}
        self.join(launcher.port, "gpu-a", program=(*PYTHON, say, str(told)), environ=environ)
        launched = launcher.host()
        launched.run()
        # Its frames are of the join kind alone, or this would raise.
        self.assertEqual([type(message).__name__ for message in launched.rest()], ["RankExited"])
        self.assertEqual(told.read_text(), "none")
