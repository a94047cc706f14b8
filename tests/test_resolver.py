"""Where a forwarded channel goes: what is refused at the start, and how a name is looked up."""

from __future__ import annotations

import socket
import threading
from typing import Any
from unittest import mock

from twisted.internet.error import DNSLookupError
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.testing import MemoryReactorClock
from twisted.trial.unittest import SynchronousTestCase

from flodl_tw.resolver import backend_from_string

BAD = (
    ("", "neither tcp nor unix"),
    ("off", "neither tcp nor unix"),
    ("tls:a:1", "neither tcp nor unix"),
    ("tcp:", "port is no number"),
    ("tcp:a", "port is no number"),
    ("tcp:a:", "port is no number"),
    ("tcp:a:-1", "port is no number"),
    ("tcp:a:٣", "port is no number"),
    ("tcp:a:0", "its port is 0, the limits are 1 and 65535"),
    ("tcp:a:99999", "its port is 99999, the limits are 1 and 65535"),
    ("tcp::5", "its host is empty"),
    ("tcp:a b:5", "no name"),
    ("tcp:" + "x" * 254 + ":5", "too long"),
    ("unix:", "its path has 0 bytes"),
    ("unix:a\0b", "no NUL"),
    ("unix:" + "x" * 108, "its path has 108 bytes, the limits are 1 and 107"),
)


class BackendTests(SynchronousTestCase):
    """Strings, look-ups and dials."""

    def setUp(self) -> None:
        self.reactor = MemoryReactorClock()
        # A thread's word reaches the reactor through this; here the test is the reactor.
        self.words: list[tuple[Any, ...]] = []
        self.said = threading.Event()
        self.reactor.callFromThread = self.from_thread

    def from_thread(self, *call: Any) -> None:
        self.words.append(call)
        self.said.set()

    def listen_to_threads(self) -> None:
        """Carry out what a thread has asked for."""
        self.assertTrue(self.said.wait(10))
        self.said.clear()
        for function, *arguments in self.words:
            function(*arguments)
        self.words.clear()

    def test_what_names_no_backend_is_refused_with_the_reason(self) -> None:
        for text, reason in BAD:
            with self.assertRaises(ValueError) as caught:
                backend_from_string(self.reactor, text)
            self.assertIn(reason, str(caught.exception), text)

    def test_addresses_are_dialed_without_a_look_up(self) -> None:
        for text, dialed in (
            ("tcp:10.0.0.9:7001", ("10.0.0.9", 7001)),
            ("tcp:[fd00::1]:7001", ("fd00::1", 7001)),
            (r"tcp:fd00\:\:1:7001", ("fd00::1", 7001)),
        ):
            backend_from_string(self.reactor, text).connect(Factory.forProtocol(Protocol))
            self.assertEqual(self.reactor.tcpClients[-1][:2], dialed)
        self.assertEqual(self.words, [])

    def test_a_unix_path_is_dialed(self) -> None:
        backend_from_string(self.reactor, "unix:/run/c.sock").connect(Factory.forProtocol(Protocol))
        self.assertEqual(self.reactor.unixClients[-1][0], "/run/c.sock")

    def look_up(self, answer: Any) -> Any:
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (answer, 5))] if isinstance(answer, str) else None
        return mock.patch("socket.getaddrinfo", side_effect=None if found else answer, return_value=found)

    def test_dials_that_wait_for_one_look_up_share_it_and_the_next_one_asks_again(self) -> None:
        backend = backend_from_string(self.reactor, "tcp:backend.example:5")
        for address in ("10.0.0.1", "10.0.0.2"):
            self.reactor.tcpClients.clear()
            with self.look_up(address) as asked:
                for _ in range(3):
                    backend.connect(Factory.forProtocol(Protocol))
                self.listen_to_threads()
                self.assertEqual(asked.call_count, 1)
            self.assertEqual([client[:2] for client in self.reactor.tcpClients], [(address, 5)] * 3)

    def test_a_name_that_does_not_resolve_fails_every_dial(self) -> None:
        backend = backend_from_string(self.reactor, "tcp:backend.invalid:5")
        with self.look_up(socket.gaierror(-2, "Name or service not known")):
            dials = [backend.connect(Factory.forProtocol(Protocol)) for _ in range(2)]
            self.listen_to_threads()
        for dial in dials:
            self.failureResultOf(dial, DNSLookupError)

    def test_a_dial_that_is_given_up_leaves_the_others_their_answer(self) -> None:
        backend = backend_from_string(self.reactor, "tcp:backend.example:5")
        with self.look_up("10.0.0.1"):
            first, _ = (backend.connect(Factory.forProtocol(Protocol)) for _ in range(2))
            first.cancel()
            self.failureResultOf(first)
            self.listen_to_threads()
        self.assertEqual(len(self.reactor.tcpClients), 1)

    def test_a_look_up_does_not_keep_the_process(self) -> None:
        going_on = threading.Event()
        self.addCleanup(going_on.set)
        backend = backend_from_string(self.reactor, "tcp:backend.example:5")

        def slow(*_: object, **__: object) -> None:
            going_on.wait(10)
            raise socket.gaierror

        with self.look_up(slow):
            backend.connect(Factory.forProtocol(Protocol)).addErrback(lambda _: None)
            threads = [thread for thread in threading.enumerate() if thread.name == "look-up of backend.example"]
            self.assertEqual([thread.daemon for thread in threads], [True])
            going_on.set()
            self.listen_to_threads()
