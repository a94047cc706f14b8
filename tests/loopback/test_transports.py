"""The door on each transport: one set of expectations over TCP, a Unix socket and TLS."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import ssl
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.endpoints import SSL4ClientEndpoint, clientFromString, serverFromString
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.internet.ssl import CertificateOptions
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread

from flodl_tw import ControllerServer, ControllerSettings
from flodl_tw.core.ends import ConnectionEnd
from flodl_tw.core.store.wire import Opcode
from flodl_tw.core.wire import DATA_MAGIC
from flodl_tw.testing import HostEndedError, SimulatedHost, make_hello
from tests.certificates import self_signed
from tests.core.store.queries import HELLO, i64, many, q, text
from tests.loopback.process import ends, read_all, reset, until
from tests.loopback.test_forward import exactly, gone_by_reset, was_reset, working
from tests.waiting import ReactorTestCase, waits

LOOPBACK = "127.0.0.1"
BIG = bytes(range(256)) * 4096 * 8
"""As large as a value of torch's store may be."""


def make_certificate(folder: Path) -> None:
    """A key and a certificate, as files."""
    key, certificate = self_signed()
    (folder / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    (folder / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


class TransportTests(ReactorTestCase):
    """Over TCP; the others differ in how they listen and dial alone."""

    half_closes = True
    """Whether an end of stream leaves the other direction open."""
    resets = True
    """Whether a reset is told from an end."""

    def setUp(self) -> None:
        from twisted.internet import reactor

        self.reactor: Any = reactor
        made = tempfile.TemporaryDirectory()
        self.addCleanup(made.cleanup)
        self.folder = Path(made.name)
        self.prepare()

    def prepare(self) -> None:
        """What the transport needs on disk."""

    def listens(self) -> str:
        return f"tcp:0:interface={LOOPBACK}"

    def dials(self, server: ControllerServer) -> IStreamClientEndpoint:
        return clientFromString(self.reactor, f"tcp:{LOOPBACK}:{server.port}")

    def connected(self, server: ControllerServer) -> socket.socket:
        """A blocking client of the same port."""
        return socket.create_connection((LOOPBACK, server.port), timeout=60)

    async def serving(self, test: Callable[[ControllerServer], Awaitable[None]], **options: Any) -> None:
        """Run a test against a server that listens."""
        settings = ControllerSettings.from_options({"join-timeout": 60, **options})
        server = ControllerServer(self.reactor, settings, serverFromString(self.reactor, self.listens()))
        server.startService()
        try:
            await server.when_listening()
            await test(server)
        finally:
            await server.stopService()

    def exchange(self, server: ControllerServer, sent: bytes, most: int) -> bytes:
        """What comes back for some bytes, until the end, a reset, or ``most`` bytes; blocks."""
        got = b""
        with self.connected(server) as client, contextlib.suppress(ConnectionResetError):
            client.sendall(sent)
            while len(got) < most and (part := client.recv(most - len(got))):
                got += part
        return got

    def ended(self, client: socket.socket) -> None:
        """The client has sent its last byte."""
        client.shutdown(socket.SHUT_WR)

    async def forwarding(self, talk: Callable[[socket.socket, socket.socket], object]) -> None:
        """Have a dialer and its backend talk over a forward, with blocking sockets; then nothing is left of it."""
        backend = socket.create_server((LOOPBACK, 0))
        backend.settimeout(60)

        def both(server: ControllerServer) -> None:
            with backend, self.connected(server) as dialer:
                if isinstance(dialer, ssl.SSLSocket):
                    # A stream that TLS has not ended has no end.
                    dialer.suppress_ragged_eofs = False
                dialer.sendall(DATA_MAGIC)
                accepted, _ = backend.accept()
                accepted.settimeout(60)
                with accepted:
                    self.assertEqual(exactly(accepted, 4), DATA_MAGIC)
                    talk(dialer, accepted)
            until(lambda: len(server.front) == 0, "the end of the forward")

        async def forward(server: ControllerServer) -> None:
            await deferToThread(both, server)

        port = backend.getsockname()[1]
        await self.serving(forward, **{"min-rank-start": 9, "data": f"tcp:{LOOPBACK}:{port}"})

    def asked(self, server: ControllerServer, sent: bytes, most: int) -> Deferred[bytes]:
        return deferToThread(self.exchange, server, sent, most)

    # The promises

    @waits
    async def test_hosts_join_and_a_world_lives_and_ends(self) -> None:
        async def live(server: ControllerServer) -> None:
            hosts = [SimulatedHost(self.reactor, make_hello(name), train_secs=0) for name in ("a", "b")]
            for host in hosts:
                await host.join(self.dials(server))
            world = await server.when_formed()
            self.assertEqual(world.world_size, 2)
            for host in hosts:
                self.assertEqual((await host.when_formed()).world_size, 2)
                self.assertIsNone(await host.when_ended())
            end = await server.when_over()
            self.assertEqual((end.phase.value, end.failure), ("done", None))

        await self.serving(live, **{"target-ranks": 2})

    @waits
    async def test_a_refused_host_gets_its_reason(self) -> None:
        async def refuse(server: ControllerServer) -> None:
            host = SimulatedHost(self.reactor, make_hello(" "))
            with self.assertRaisesRegex(HostEndedError, "bad-host: "):
                await host.join(self.dials(server))

        await self.serving(refuse, **{"min-rank-start": 9})

    @waits
    async def test_the_state_answers(self) -> None:
        async def ask(server: ControllerServer) -> None:
            answer = await self.asked(server, b"GET /state.json HTTP/1.1\r\nHost: localhost\r\n\r\n", 1 << 20)
            head, _, body = answer.partition(b"\r\n\r\n")
            self.assertTrue(head.startswith(b"HTTP/1.1 200 OK\r\n"), answer)
            self.assertEqual(json.loads(body), server.state())
            # From this machine the operator needs no token.
            answer = await self.asked(server, b"POST /abort HTTP/1.1\r\nHost: localhost\r\n\r\n", 1 << 20)
            self.assertTrue(answer.startswith(b"HTTP/1.1 200 OK\r\n"), answer)

        await self.serving(ask, **{"min-rank-start": 9, "start": "manual"})

    @waits
    async def test_a_request_over_a_limit_or_none_is_refused_and_counted(self) -> None:
        async def refuse(server: ControllerServer) -> None:
            for request, code in (
                (b"POST /start HTTP/1.1\r\nContent-Length: 4097\r\n\r\n", 413),
                (b"GET /" + b"x" * 3000, 414),
                (b"GET / HTTP/1.1\r\nno colon\r\nHost: localhost\r\n\r\n", 400),
            ):
                answer = await self.asked(server, request, 1 << 20)
                self.assertTrue(answer.startswith(b"HTTP/1.1 %d " % code), answer)
                self.assertEqual(answer.count(b"HTTP/1.1"), 1)
                self.assertEqual(server.front.ended[ConnectionEnd[f"HTTP_{code}"]], 1)

        await self.serving(refuse, **{"min-rank-start": 9})

    @waits
    async def test_ranks_meet_in_the_store(self) -> None:
        async def meet(server: ControllerServer) -> None:
            await SimulatedHost(self.reactor, make_hello(), train_secs=None).join(self.dials(server))
            await server.when_formed()
            store = server.controller.run.store
            assert store is not None
            waiting = self.asked(server, HELLO + many(Opcode.WAIT, b"/big"), 1)
            while not store.keys.waiting():
                await deferLater(self.reactor, 0.01)
            stored = self.asked(server, HELLO + q(Opcode.SET, b"/big", BIG) + q(Opcode.ADD, b"/n", 2), 8)
            self.assertEqual((await waiting, await stored), (b"\0", i64(2)))
            # The answers have no room in the buffers between, and leave as the client reads them.
            asked = many(Opcode.WAIT, b"/n") + q(Opcode.GET, b"/big") * 3 + q(Opcode.GETNUMKEYS)
            answers = b"\0" + text(BIG) * 3 + i64(2)
            self.assertTrue(await self.asked(server, HELLO + asked, len(answers)) == answers)
            # An opcode that is none is closed after what came before it is answered.
            self.assertEqual(await self.asked(server, HELLO + asked[-1:] + b"\x7f", 100), i64(2))
            self.assertEqual({end.value for end in server.front.ended}, {"store-closed"})

        await self.serving(meet, **{"target-ranks": 1})

    @waits
    async def test_a_stop_tells_the_hosts(self) -> None:
        hosts: list[SimulatedHost] = []

        async def train(server: ControllerServer) -> None:
            hosts.append(await SimulatedHost(self.reactor, make_hello(), train_secs=None).join(self.dials(server)))
            await hosts[0].when_formed()

        await self.serving(train, **{"target-ranks": 1})
        self.assertIn("the controller was stopped", str(await hosts[0].when_ended()))

    @waits
    async def test_noise_and_silence_are_closed(self) -> None:
        async def close(server: ControllerServer) -> None:
            noise = (b"SSH-2.0-x\r\n", b"\xe0\x17\x0d\xf1")
            answers = await gatherResults([self.asked(server, sent, 1) for sent in noise])
            self.assertEqual(answers, [b"", b""])
            self.assertEqual({end.value for end in server.front.ended}, {"unknown-channel", "rendezvous-early"})

        await self.serving(close, **{"min-rank-start": 9})

    @waits
    async def test_a_forward_brings_every_byte_both_ways(self) -> None:
        up, down = (random.Random(seed).randbytes(3_000_001) for seed in (1, 2))

        def talk(dialer: socket.socket, accepted: socket.socket) -> None:
            with working(lambda: dialer.sendall(up)):
                self.assertTrue(exactly(accepted, len(up)) == up)
            with working(lambda: accepted.sendall(down)):
                self.assertTrue(exactly(dialer, len(down)) == down)

        await self.forwarding(talk)

    @waits
    async def test_the_end_of_a_forwarded_dialer_comes_after_its_last_byte(self) -> None:
        data = random.Random(3).randbytes(1_000_000)

        def talk(dialer: socket.socket, accepted: socket.socket) -> None:
            with working(lambda: (dialer.sendall(data), self.ended(dialer))):
                self.assertTrue(read_all(accepted) == data)
            if self.half_closes:
                accepted.sendall(b"answer")
                accepted.close()
                self.assertEqual(read_all(dialer), b"answer")

        await self.forwarding(talk)

    @waits
    async def test_the_end_of_a_backend_comes_after_its_last_byte(self) -> None:
        data = random.Random(4).randbytes(1_000_000)

        def talk(dialer: socket.socket, accepted: socket.socket) -> None:
            with working(lambda: (accepted.sendall(data), accepted.shutdown(socket.SHUT_WR))):
                self.assertTrue(read_all(dialer) == data)
            if self.half_closes:
                dialer.sendall(b"late question")
                dialer.close()
                self.assertEqual(read_all(accepted), b"late question")

        await self.forwarding(talk)

    @waits
    async def test_a_backend_that_ends_while_its_dialer_is_paused_gets_what_was_read(self) -> None:
        def talk(dialer: socket.socket, accepted: socket.socket) -> None:
            taken = fill(dialer)
            accepted.shutdown(socket.SHUT_WR)
            self.assertEqual(dialer.recv(1), b"")
            with working(dialer.close):
                got = len(drained(accepted))
            self.assertGreater(got, 100_000)
            self.assertLessEqual(got, taken)

        await self.forwarding(talk)

    @waits
    async def test_a_reset_by_the_backend_reaches_the_dialer(self) -> None:
        def talk(dialer: socket.socket, accepted: socket.socket) -> None:
            reset(accepted)
            self.assertTrue((cut_off if self.resets else ends)(dialer))

        await self.forwarding(talk)

    @waits
    async def test_a_reset_by_the_dialer_reaches_the_backend(self) -> None:
        def talk(dialer: socket.socket, accepted: socket.socket) -> None:
            reset(dialer)
            self.assertTrue((was_reset if self.resets else ends)(accepted))

        await self.forwarding(talk)

    @waits
    async def test_a_dialer_that_resets_while_its_backend_does_not_read_is_known_at_once(self) -> None:
        if not self.resets:
            return

        def talk(dialer: socket.socket, accepted: socket.socket) -> None:
            fill(dialer)
            reset(dialer)
            self.assertTrue(gone_by_reset(accepted))

        await self.forwarding(talk)


def fill(client: socket.socket) -> int:
    """Send until no more is taken; gives the count of bytes."""
    taken, block = 0, bytes(65536)
    client.settimeout(0.5)
    with contextlib.suppress(TimeoutError, ssl.SSLWantWriteError):
        while True:
            taken += client.send(block)
    client.settimeout(60)
    return taken


def cut_off(client: socket.socket) -> bool:
    """Whether the stream stops without an end."""
    try:
        client.recv(1)
    except (ConnectionResetError, ssl.SSLEOFError):
        return True
    return False


def drained(client: socket.socket) -> bytes:
    """All that comes until the end, or a reset."""
    got = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(65536):
            got += part
    return bytes(got)


class UnixTests(TransportTests):
    """Over a Unix socket."""

    resets = False

    def listens(self) -> str:
        return f"unix:{self.folder / 'door'}"

    def dials(self, server: ControllerServer) -> IStreamClientEndpoint:
        return clientFromString(self.reactor, f"unix:{self.folder / 'door'}")

    def connected(self, server: ControllerServer) -> socket.socket:
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(60)
        client.connect(str(self.folder / "door"))
        return client


class TLSTests(TransportTests):
    """Behind TLS."""

    half_closes = False

    def ended(self, client: socket.socket) -> None:
        assert isinstance(client, ssl.SSLSocket)
        client.unwrap()

    def prepare(self) -> None:
        make_certificate(self.folder)

    def listens(self) -> str:
        files = f"privateKey={self.folder / 'key.pem'}:certKey={self.folder / 'cert.pem'}"
        return f"ssl:0:interface={LOOPBACK}:{files}"

    def dials(self, server: ControllerServer) -> IStreamClientEndpoint:
        return SSL4ClientEndpoint(self.reactor, LOOPBACK, server.port, CertificateOptions())

    def connected(self, server: ControllerServer) -> socket.socket:
        context = ssl.create_default_context(cafile=str(self.folder / "cert.pem"))
        context.check_hostname = False
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        return context.wrap_socket(super().connected(server))
