"""How a name is looked up: in a thread of its own, once for all who wait, and as Twisted's endpoints ask for it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

from twisted.internet.address import IPv4Address, IPv6Address
from twisted.internet.defer import CancelledError
from twisted.internet.endpoints import HostnameEndpoint
from twisted.internet.error import DNSLookupError
from twisted.internet.interfaces import IHostnameResolver, IHostResolution
from twisted.internet.protocol import Factory, Protocol
from twisted.trial.unittest import SynchronousTestCase
from zope.interface.verify import verifyObject

from flodl_tw.resolver import MAX_ADDRESSES, ThreadResolver
from tests.agent.links import HandReactor, entries

UNKNOWN = socket.gaierror(socket.EAI_NONAME, "Name or service not known")


class ResolverTestCase(SynchronousTestCase):
    """A resolver whose answers a test decides."""

    def setUp(self) -> None:
        self.reactor = HandReactor()
        self.asked: list[str] = []
        self.answer: Callable[[], list[Any]] = lambda: entries("10.0.0.1")
        self.resolver = ThreadResolver(self.reactor, self.getaddrinfo)
        self.reactor.installNameResolver(self.resolver)

    def getaddrinfo(self, host: str, port: None, **options: Any) -> list[Any]:
        """Called in a thread."""
        self.assertEqual((port, options), (None, {"type": socket.SOCK_STREAM}))
        self.asked.append(host)
        return self.answer()

    def fails(self, error: Exception) -> None:
        """The next look-ups fail so."""

        def answer() -> list[Any]:
            raise error

        self.answer = answer


class LookUpTests(ResolverTestCase):
    """What is given for a name."""

    def test_every_address_is_given_once_in_the_systems_order_up_to_the_limit(self) -> None:
        self.answer = lambda: entries("::1", "10.0.0.2", "10.0.0.1", "10.0.0.2", *(f"10.0.1.{n}" for n in range(9)))
        found = self.resolver.look_up("gpu-a")
        self.reactor.thread_answers()
        answer = self.successResultOf(found)
        self.assertEqual(answer[:4], ["::1", "10.0.0.2", "10.0.0.1", "10.0.1.0"])
        self.assertEqual(len(answer), MAX_ADDRESSES)

    def test_a_link_local_address_keeps_its_scope(self) -> None:
        self.answer = lambda: [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fe80::1", 0, 0, 3))]
        found = self.resolver.look_up("gpu-a")
        self.reactor.thread_answers()
        self.assertEqual(self.successResultOf(found), ["fe80::1%3"])

    def test_an_address_is_itself_and_nobody_is_asked(self) -> None:
        for address in ("10.0.0.9", "::1", "fe80::1%lo"):
            self.assertEqual(self.successResultOf(self.resolver.look_up(address)), [address])
        self.assertEqual(self.asked, [])

    def test_those_who_wait_share_one_look_up_and_the_next_one_asks_again(self) -> None:
        for address in ("10.0.0.1", "10.0.0.2"):
            self.answer = lambda address=address: entries(address)
            found = [self.resolver.look_up("gpu-a") for _ in range(3)]
            self.reactor.thread_answers()
            self.assertEqual([self.successResultOf(each) for each in found], [[address]] * 3)
        self.assertEqual(self.asked, ["gpu-a"] * 2)

    def test_two_names_are_looked_up_side_by_side(self) -> None:
        found = [self.resolver.look_up(name) for name in ("gpu-a", "gpu-b")]
        for _ in found:
            self.reactor.thread_answers()
        self.assertEqual(sorted(self.asked), ["gpu-a", "gpu-b"])
        for each in found:
            self.successResultOf(each)

    def test_a_name_without_an_address_fails_for_all_in_the_systems_words(self) -> None:
        for error, words in ((UNKNOWN, "Name or service not known"), (UnicodeError("label too long"), "it is no name")):
            self.fails(error)
            found = [self.resolver.look_up("gpu-a") for _ in range(2)]
            self.reactor.thread_answers()
            for each in found:
                self.assertIn(words, str(self.failureResultOf(each, OSError).value))

    def test_a_wait_that_is_given_up_leaves_the_others_their_answer(self) -> None:
        first, second = self.resolver.look_up("gpu-a"), self.resolver.look_up("gpu-a")
        first.cancel()
        self.failureResultOf(first, CancelledError)
        self.reactor.thread_answers()
        self.assertEqual(self.successResultOf(second), ["10.0.0.1"])

    def test_a_look_up_does_not_keep_the_process(self) -> None:
        going_on = threading.Event()
        self.addCleanup(going_on.set)

        def slow() -> list[Any]:
            going_on.wait(10)
            return entries("10.0.0.1")

        self.answer = slow
        found = self.resolver.look_up("gpu-a")
        threads = [thread for thread in threading.enumerate() if thread.name == "look-up of gpu-a"]
        self.assertEqual([thread.daemon for thread in threads], [True])
        going_on.set()
        self.reactor.thread_answers()
        self.successResultOf(found)


class EndpointTests(ResolverTestCase):
    """As Twisted asks: an endpoint of a name dials what the resolver gives."""

    def resolved(self, kinds: Any = None) -> list[Any]:
        """What a receiver is told."""
        told: list[Any] = []

        class Receiver:
            resolutionBegan = told.append  # noqa: N815  Twisted's names
            addressResolved = told.append  # noqa: N815

            def resolutionComplete(self) -> None:  # noqa: N802
                told.append("complete")

        receiver: Any = Receiver()
        self.resolver.resolveHostName(receiver, "gpu-a", 7, kinds)
        self.reactor.thread_answers()
        return told

    def test_a_receiver_hears_of_each_address_and_of_the_end(self) -> None:
        verifyObject(IHostnameResolver, self.resolver)
        self.answer = lambda: entries("::1", "10.0.0.1")
        addresses = [IPv6Address("TCP", "::1", 7), IPv4Address("TCP", "10.0.0.1", 7)]
        for kinds, told in ((None, addresses), ([IPv6Address], addresses[:1]), ([IPv4Address], addresses[1:])):
            resolution, *rest = self.resolved(kinds)
            verifyObject(IHostResolution, resolution)
            self.assertEqual(resolution.name, "gpu-a")
            self.assertEqual(rest, [*told, "complete"])

    def test_a_name_without_an_address_is_complete_with_none(self) -> None:
        self.fails(UNKNOWN)
        self.assertEqual(self.resolved()[1:], ["complete"])

    def test_an_endpoint_dials_the_addresses_one_beside_the_other(self) -> None:
        self.answer = lambda: entries("10.0.0.1", "::1")
        dial = HostnameEndpoint(self.reactor, "gpu-a", 5).connect(Factory.forProtocol(Protocol))
        self.reactor.thread_answers()
        self.reactor.advance(0.3)
        self.assertEqual(self.reactor.open_dials(), ["10.0.0.1", "::1"])
        transport = self.reactor.take()
        self.addCleanup(transport.handle.close)
        self.assertIs(self.successResultOf(dial).transport, transport)
        self.assertEqual(self.reactor.open_dials(), [])

    def test_an_endpoint_of_an_unknown_name_fails_and_so_does_one_that_is_given_up(self) -> None:
        self.fails(UNKNOWN)
        endpoint = HostnameEndpoint(self.reactor, "gpu-a", 5)
        unknown, given_up = (endpoint.connect(Factory.forProtocol(Protocol)) for _ in range(2))
        given_up.cancel()
        self.failureResultOf(given_up)
        self.reactor.thread_answers()
        self.failureResultOf(unknown, DNSLookupError)
