"""The listening socket and what Linux is told about connections.

The socket is bound before the process forks, so a busy port is an error at
the command line.  Options that every connection needs are set on the listener,
from which accepted sockets inherit them.
"""

from __future__ import annotations

import errno
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from twisted.internet.interfaces import ISystemHandle, ITransport

from flodl_tw.core.addresses import classify, show_endpoint
from flodl_tw.core.errors import SettingError
from flodl_tw.limits import BACKLOG, KEEPALIVE_PROBES, Limits

_MOST_KEEPALIVE_SECS: Final = 32767
_MOST_MS: Final = (1 << 31) - 1


def listen(interface: str, port: int, limits: Limits) -> socket.socket:
    """A listening socket on ``interface`` (empty: every address, IPv4 and IPv6 in one) and ``port``.

    Raises SettingError with one line for the operator when it cannot be had.
    """
    family, address = _resolve(interface)
    interface = interface if interface.isprintable() else repr(interface)
    sock = _socket(family, interface)
    host, scope = (address[0], address[2:]) if address else ("::" if sock.family is socket.AF_INET6 else "", ())
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _tune(sock, limits)
        if sock.family is socket.AF_INET6:
            # The system's default may be either; an operator who lists one address means that one.
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind((host, port, *scope))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise _bind_error(interface, port, error) from None
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


def _socket(family: socket.AddressFamily | None, interface: str) -> socket.socket:
    if family is not None:
        try:
            return socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            raise SettingError(
                "--interface", interface, f"this machine cannot open it ({error.strerror})", "name another address"
            ) from None
    return socket.socket(socket.AF_INET6 if has_ipv6() else socket.AF_INET, socket.SOCK_STREAM)


def has_ipv6() -> bool:
    """Whether this machine can bind IPv6; a kernel may have it compiled in and switched off."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as trial:
            trial.bind(("::", 0))
    except OSError:
        return False
    return True


def _resolve(interface: str) -> tuple[socket.AddressFamily | None, tuple[Any, ...]]:
    """The family and socket address of ``interface``; no family for every address."""
    if not interface:
        return None, ()
    try:
        found = socket.getaddrinfo(interface, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        # A name that is no name at all (an empty or over-long label) is a UnicodeError.
        why = getattr(error, "strerror", None) or "it is no host name"
        shown = interface if interface.isprintable() else repr(interface)
        raise SettingError(
            "--interface", shown, f"it does not resolve ({why})", "give one of this machine's addresses"
        ) from None
    addresses = list(dict.fromkeys((info[0], tuple(info[4])) for info in found))
    if len(addresses) > 1:
        named = ", ".join(str(address[0]) for _, address in addresses)
        raise SettingError(
            "--interface", interface, f"it stands for {len(addresses)} addresses ({named})", "name one of them"
        )
    return addresses[0]


def _bind_error(interface: str, port: int, error: OSError) -> SettingError:
    if error.errno == errno.EADDRINUSE:
        holder = port_holder(port)
        return SettingError(
            "--port",
            port,
            "it is in use" + (f" by process {holder}" if holder else ""),
            "end what holds it, or choose another --port",
        )
    if error.errno == errno.EACCES:
        return SettingError("--port", port, "this user may not bind it", "choose a --port of 1024 or more")
    return SettingError(
        "--interface",
        interface or "(all)",
        f"it cannot be bound ({error.strerror})",
        "name one of this machine's addresses",
    )


def _listening_inodes(port: int) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                yield f"socket:[{fields[9]}]"


def port_holder(port: int) -> int | None:
    """The process id that listens on ``port``, where this user may see it."""
    inodes = set(_listening_inodes(port))
    for directory in Path("/proc").glob("[0-9]*/fd") if inodes else ():
        try:
            if any(os.readlink(entry) in inodes for entry in directory.iterdir()):
                return int(directory.parent.name)
        except OSError:
            continue
    return None


def bound_to_loopback(sock: socket.socket) -> bool:
    """Whether only this machine reaches the socket, judged by where it is really bound."""
    return classify(sock.getsockname()[0]).loopback


def shown_binding(sock: socket.socket) -> str:
    """Where the socket is bound, for the log."""
    host, port = sock.getsockname()[:2]
    note = {"::": " (IPv4 and IPv6)", "0.0.0.0": " (IPv4 alone)"}.get(host, "")  # noqa: S104
    return show_endpoint(classify(host).shown, port) + note


def raise_descriptor_limit() -> int:
    """Raise this process's descriptor limit to what the system grants, and give it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return soft


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
