"""The listening socket and what Linux is told about connections.

The socket is bound before the process forks, so a busy port is an error at
the command line.  Options that every connection needs are set on the listener,
from which accepted sockets inherit them.
"""

from __future__ import annotations

import errno
import resource
import socket
from typing import Final

from twisted.internet.interfaces import ISystemHandle, ITransport

from flodl_tw.core.addresses import classify, show_endpoint
from flodl_tw.core.errors import SettingError
from flodl_tw.core.log_text import printable
from flodl_tw.limits import BACKLOG, KEEPALIVE_PROBES, Limits

_MOST_KEEPALIVE_SECS: Final = 32767
_OURS: Final = "name one of this machine's addresses"
_MOST_MS: Final = (1 << 31) - 1


def listen(interface: str, port: int, limits: Limits) -> socket.socket:
    """A listening socket on ``interface`` (empty: every address, IPv4 and IPv6 in one) and ``port``.

    Raises SettingError with one line for the operator when it cannot be had.
    """
    family, (host, _, *scope) = _resolve(interface)
    try:
        return _bound(family, (host, port, *scope), limits)
    except OSError as error:
        raise _bind_error(interface, port, error) from None


def _bound(family: socket.AddressFamily, address: tuple[object, ...], limits: Limits) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _tune(sock, limits)
        if family is socket.AF_INET6:
            # The system's default may be either; an operator who lists one address means that one.
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def _tune(sock: socket.socket, limits: Limits) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_USER_TIMEOUT, _timeout_ms(limits.write_stall)),
        (socket.TCP_KEEPIDLE, min(limits.keepalive_idle, _MOST_KEEPALIVE_SECS)),
        (socket.TCP_KEEPINTVL, min(limits.keepalive_interval, _MOST_KEEPALIVE_SECS)),
        (socket.TCP_KEEPCNT, KEEPALIVE_PROBES),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _timeout_ms(seconds: int) -> int:
    return min(seconds * 1000, _MOST_MS)


def has_ipv6() -> bool:
    """Whether this machine can bind IPv6; a kernel may have it compiled in and switched off."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as trial:
            trial.bind(("::", 0))
    except OSError:
        return False
    return True


def _resolve(interface: str) -> tuple[socket.AddressFamily, tuple[object, ...]]:
    """The family and socket address of ``interface``, or of every address."""
    if not interface:
        return (socket.AF_INET6, ("::", 0)) if has_ipv6() else (socket.AF_INET, ("", 0))
    try:
        found = socket.getaddrinfo(interface, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        # A name that is no name at all (an empty or over-long label) is a UnicodeError.
        why = f"it does not resolve ({getattr(error, 'strerror', None) or 'it is no host name'})"
        raise SettingError("--interface", printable(interface), why, _OURS) from None
    addresses = list(dict.fromkeys((info[0], tuple(info[4])) for info in found))
    if len(addresses) > 1:
        named = ", ".join(str(address[0]) for _, address in addresses)
        why = f"it stands for {len(addresses)} addresses ({named})"
        raise SettingError("--interface", interface, why, "name one of them")
    return addresses[0]


def _bind_error(interface: str, port: int, error: OSError) -> SettingError:
    if error.errno == errno.EADDRINUSE:
        way_out = f"end what holds it (ss -ltnp 'sport = :{port}' tells), or choose another --port"
        return SettingError("--port", port, "it is in use", way_out)
    if error.errno == errno.EACCES:
        return SettingError("--port", port, "this user may not bind it", "choose a --port of 1024 or more")
    why = f"it cannot be bound ({error.strerror})"
    return SettingError("--interface", printable(interface) or "(all)", why, _OURS)


def bound_to_loopback(sock: socket.socket) -> bool:
    """Whether only this machine reaches the socket, judged by where it is really bound."""
    return classify(sock.getsockname()[0]).loopback


def shown_binding(sock: socket.socket) -> str:
    """Where the socket is bound, for the log."""
    host, port = sock.getsockname()[:2]
    note = {"::": " (IPv4 and IPv6)", "0.0.0.0": " (IPv4 alone)"}.get(host, "")  # noqa: S104
    return show_endpoint(classify(host).shown, port) + note


def raise_descriptor_limit() -> None:
    """Raise this process's descriptor limit to what the system grants."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def descriptor_limit() -> int:
    """How many files and sockets this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def tune_link(transport: ITransport, limits: Limits) -> None:
    """Have Linux notice a control link whose host vanished, within ``limits.link_stall`` seconds."""
    _set_user_timeout(transport, _timeout_ms(limits.link_stall))


def bear_pauses(transport: ITransport) -> None:
    """Let a peer stop reading for as long as it likes: a rank in a debugger.  One that is gone is still noticed."""
    _set_user_timeout(transport, 0)


def tune_backend(transport: ITransport, limits: Limits) -> None:
    """Give a connection that we dialed what accepted ones inherit."""
    sock = tcp_socket(transport)
    if sock is not None:
        _tune(sock, limits)


def has_hung_up(transport: ITransport) -> bool:
    """Whether the peer of a plain connection has ended it, and all that it sent before has been read."""
    handle = transport.getHandle() if ISystemHandle.providedBy(transport) else None
    if not isinstance(handle, socket.socket):
        return False
    try:
        return handle.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def tcp_socket(transport: ITransport) -> socket.socket | None:
    """The TCP socket of a plain connection; None behind a Unix socket or TLS, and in memory."""
    handle = transport.getHandle() if ISystemHandle.providedBy(transport) else None
    if isinstance(handle, socket.socket) and handle.family in (socket.AF_INET, socket.AF_INET6):
        return handle
    return None


def _set_user_timeout(transport: ITransport, ms: int) -> None:
    sock = tcp_socket(transport)
    if sock is not None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, ms)
