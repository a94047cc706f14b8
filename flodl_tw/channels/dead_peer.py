"""Peers that died without a word: how silence is told from a reset, and how a death is seen where nobody reads."""

from __future__ import annotations

import contextlib
import math
import select
import socket
import struct
from typing import Final, Protocol

from twisted.internet import tcp
from twisted.internet.interfaces import IFileDescriptor, IReactorFDSet, IReadDescriptor, ITransport
from twisted.python.failure import Failure
from zope.interface import implementer

from flodl_tw.limits import Limits

# Linux's struct tcp_info has eight bytes and then 32-bit words; the 13th is the time since the last ACK came, in ms.
_LAST_ACK_RECV_OFFSET: Final = 8 + 12 * 4
_TCP_INFO_BYTES: Final = _LAST_ACK_RECV_OFFSET + 4


class WatchedServer(tcp.Server):
    """An accepted connection that remembers whether its peer had fallen silent when it ended.

    Twisted reports a reset and a timeout alike, and has closed the socket by
    the time a protocol hears of it, so the kernel is asked just before.
    """

    silent_after_ms: float = math.inf
    went_silent = False
    _writing = False

    def at_rest(self) -> bool:
        """Whether it is open, and no bytes wait for the kernel to have room."""
        return not self._writing and bool(self.connected) and not self.disconnecting

    def startWriting(self) -> None:
        self._writing = True
        super().startWriting()

    def stopWriting(self) -> None:
        self._writing = False
        super().stopWriting()

    def connectionLost(self, reason: Failure) -> None:
        with contextlib.suppress(OSError, struct.error):
            info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            (last_ack_ms,) = struct.unpack_from("@I", info, _LAST_ACK_RECV_OFFSET)
            # A peer that lives acknowledges a keepalive probe each keepalive_idle seconds.
            self.went_silent = last_ack_ms > self.silent_after_ms
        super().connectionLost(reason)


def send(transport: ITransport, data: bytes) -> None:
    """Write to any transport; at once where it is an accepted socket and nothing waits before these bytes.

    Twisted's ``write`` first asks the reactor to be told when the kernel has
    room, and that costs more than the writing itself.
    """
    if isinstance(transport, WatchedServer) and transport.at_rest():
        sent = transport.writeSomeData(data)
        if sent == len(data):
            return
        # A lost connection gives an exception in place of a count; write() lets the reactor find the loss.
        if isinstance(sent, int):
            data = data[sent:]
    transport.write(data)


def watched_transport(limits: Limits) -> type[tcp.Server]:
    """The transport class for a port: its connections know silence from a reset."""

    class Transport(WatchedServer):
        silent_after_ms = (limits.keepalive_idle + limits.keepalive_interval) * 1000

    return Transport


def went_silent(transport: object) -> bool:
    """Whether the peer of a connection that has just ended had stopped answering."""
    # A TLS transport hands the question on to the one that it wraps.
    return bool(getattr(transport, "went_silent", False))


class Watched(Protocol):
    """One end of a forward, as a ``DeathWatch`` sees it."""

    watched: int | None
    """The descriptor that is watched; the watch sets it."""

    @property
    def transport(self) -> ITransport:
        """What is not read."""

    def abort(self) -> None:
        """The connection is dead, and is to be reset."""


@implementer(IReadDescriptor)
class DeathWatch:
    """Notices that a connection has died while nobody reads it.

    A transport that is paused, or has had its last byte, is not in the
    reactor's poll, and a reset would wait there for a read that may never
    come.  A poll reports errors without being asked, so this one asks for
    nothing else.
    """

    def __init__(self, reactor: IReactorFDSet) -> None:
        self._reactor = reactor
        self._poll = select.epoll()
        self._legs: dict[int, Watched] = {}
        reactor.addReader(self)

    def add(self, leg: Watched) -> None:
        """Nobody reads the leg from here on.  One whose transport has no open socket is not watched."""
        descriptor = leg.transport.fileno() if IFileDescriptor.providedBy(leg.transport) else -1
        if descriptor < 0 or leg.watched is not None or self._poll.closed:
            return
        leg.watched = descriptor
        self._legs[descriptor] = leg
        # Edge-triggered: a hang-up stays, and would wake the reactor again and again until a slow peer has read all.
        self._poll.register(descriptor, select.EPOLLET)

    def remove(self, leg: Watched) -> None:
        """The leg is read again, or gone."""
        descriptor, leg.watched = leg.watched, None
        if descriptor is None or self._legs.pop(descriptor, None) is None:
            return
        # A closed descriptor has left the poll by itself, so it cannot be unregistered.
        with contextlib.suppress(OSError):
            self._poll.unregister(descriptor)

    def fileno(self) -> int:
        return self._poll.fileno()

    def logPrefix(self) -> str:
        return "DeathWatch"

    def doRead(self) -> None:
        for descriptor, event in self._poll.poll(0):
            leg = self._legs.get(descriptor)
            # A hang-up without an error says that both sides have shut, and bytes may still wait to be read.
            if leg is not None and event & select.EPOLLERR:
                leg.abort()

    def stop(self) -> None:
        """Let go of the reactor, once nothing is forwarded any more."""
        self._reactor.removeReader(self)
        self._close()

    def connectionLost(self, reason: Failure) -> None:
        """The reactor ends, and closes what it reads in no order: legs may still come to be removed."""
        self._close()

    def _close(self) -> None:
        self._legs.clear()
        self._poll.close()
