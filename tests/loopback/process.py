"""A real ``twistd flodl-controller`` and a small blocking client, for tests that need no fake.

Each process has a folder of its own and is killed, by its id, at the end of
the test, or tests, that started it.  Every wait here is for something to happen,
and has a deadline.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sysconfig
import tempfile
import time
import unittest
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from sys import executable
from typing import Any, Protocol, TypeVar, cast

from flodl_tw.core.messages import JoinMessage
from flodl_tw.testing import SimulatedClient, make_hello

WAIT = 60.0
"""Seconds that anything may take that has no limit of its own, on the slowest machine."""
SLOWNESS = 10.0
"""Seconds that the slowest machine may add to a promise of one or two."""
PATIENT = 100.0
"""A time scale at which no deadline of a controller's comes within ``WAIT``: what ends there, ends for another reason.
"""
LOOPBACK = "127.0.0.1"
TWISTD = (executable, str(Path(sysconfig.get_path("scripts")) / "twistd"))
Value = TypeVar("Value")


def until(condition: Callable[[], Value], what: str, seconds: float = WAIT) -> Value:
    """Wait for ``condition`` to give something true, and give that; AssertionError once it is too late."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(0.01)
    return value


_ports = itertools.count(os.getpid() * 16)


def free_port() -> int:
    """A port that nothing listens on, from below those that the kernel hands out: no other test gets it meanwhile."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    dual = socket.has_dualstack_ipv6()
    for number in _ports:
        port = lowest - 1 - number % 16384
        try:
            family = socket.AF_INET6 if dual else socket.AF_INET
            socket.create_server(("", port), family=family, dualstack_ipv6=dual).close()
        except OSError:
            continue
        break
    return port


def alive(pid: int) -> bool:
    """Whether the process runs; one that waits to be reaped does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without what a controller would read, and with ``extra``."""
    ours = ("STATE_DIRECTORY", "XDG_STATE_HOME", "NOTIFY_SOCKET")
    kept = {name: text for name, text in os.environ.items() if not name.startswith("FLODL_") and name not in ours}
    return {**kept, **extra}


# Forks once for each order that it reads, into a ``twistd`` whose imports are done: half a second less each time.
_FORKER = """
import json, os, sys
from twisted.scripts.twistd import run
import flodl_tw.tap
assert "twisted.internet.reactor" not in sys.modules
for line in sys.stdin:
    pid = os.fork()
    if not pid:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
else:
    sys.exit()
order = json.loads(line)
os.chdir(order["folder"])
os.environ.clear()
os.environ.update(order["environ"])
for number, name in enumerate((os.devnull, order["out"], order["err"])):
    os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), number)
sys.argv = ["twistd", *order["words"]]
run()
"""
GOES_ON = 99
"""The status that ``Forker.run`` gives for a process that did not end."""


class Forker:
    """Runs many ``twistd`` that are to end by themselves, each in a process of its own that needs no start-up."""

    def __init__(self) -> None:
        self._process = self._started()

    def _started(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [executable, "-c", _FORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def run(self, words: tuple[str, ...], folder: Path, environ: Mapping[str, str]) -> tuple[int, str, str]:
        """Exit status, output and errors of ``twistd words``, run in ``folder``."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with tempfile.TemporaryDirectory(prefix="flodl-tw-") as made:
            out, err = Path(made) / "out", Path(made) / "err"
            order = {"words": words, "folder": str(folder), "environ": dict(environ), "out": str(out), "err": str(err)}
            self._process.stdin.write(json.dumps(order) + "\n")
            ended, _, _ = select.select([self._process.stdout], [], [], WAIT)
            if ended:
                status = int(self._process.stdout.readline())
            else:
                status = GOES_ON
                self.close()
                self._process = self._started()
            return status, out.read_text(), err.read_text()

    def close(self) -> None:
        """End it, with what it still runs."""
        pid = self._process.pid
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
        self._process.kill()
        self._process.communicate()


class Twistd:
    """One ``twistd flodl-controller``, from its start to its end.

    ``interface`` is left out of the command line when it is None, and so is
    the state folder when ``state_dir`` is.  ``command`` replaces ``twistd``
    itself, and ``folder`` is where it runs (a new one unless it is given).
    """

    def __init__(
        self,
        *options: str,
        port: int = 0,
        interface: str | None = LOOPBACK,
        daemonised: bool = False,
        scale: float | None = None,
        environ: Mapping[str, str] | None = None,
        folder: Path | None = None,
        state_dir: str | None = "state",
        command: tuple[str, ...] = TWISTD,
    ) -> None:
        self._made = tempfile.TemporaryDirectory(prefix="flodl-tw-") if folder is None else None
        self.folder = Path(self._made.name) if self._made is not None else folder or Path()
        self.daemonised = daemonised
        self.pidfile = self.folder / "twistd.pid"
        self.port_file = self.folder / "port"
        self.port_file.unlink(missing_ok=True)
        self._out = self.folder / "out"
        self._err = self.folder / "err"
        self._daemon: int | None = None
        words = [*command, *(() if daemonised else ("-n",)), "flodl-controller"]
        words += ["--port", str(port), "--port-file", str(self.port_file)]
        words += [] if state_dir is None else ["--state-dir", state_dir]
        words += [] if interface is None else ["--interface", interface]
        scaling = {} if scale is None else {"FLODL_NET_TIMEOUT_SCALE": str(scale)}
        self.started_at = time.monotonic()
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [*words, *options],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=self.folder,
                env=environment({"HOME": str(self.folder), **scaling, **(environ or {})}),
            )

    # Its start

    def listening(self) -> Twistd:
        """Wait until it listens; gives itself."""
        until(lambda: self.port_file.exists() or self._failed(), "the port file")
        if not self.port_file.exists():
            raise AssertionError(f"it ended with {self.process.returncode}: {self.stderr}{self.log}")
        if self.daemonised:
            self._daemon = int(until(self._pid_text, "the pidfile"))
        return self

    def _failed(self) -> bool:
        status = self.process.poll()
        return status is not None and (status != 0 or not self.daemonised)

    def _pid_text(self) -> str:
        return self.pidfile.read_text().strip() if self.pidfile.exists() else ""

    @property
    def port(self) -> int:
        """Where it listens, from its port file."""
        return int(self.port_file.read_text())

    @property
    def pid(self) -> int:
        """The server's process."""
        return self.process.pid if self._daemon is None else self._daemon

    @property
    def log(self) -> str:
        """Its log so far."""
        return (self.folder / "twistd.log" if self.daemonised else self._out).read_text()

    @property
    def stderr(self) -> str:
        """What it wrote for the person at the command line."""
        return self._err.read_text()

    def said(self, text: str, seconds: float = WAIT) -> str:
        """Wait for a line of the log that has ``text``; gives the first."""
        return until(lambda: next((line for line in self.log.splitlines() if text in line), ""), text, seconds)

    # What it costs

    def descriptors(self) -> int:
        """How many file descriptors it has open."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def resident_kib(self) -> int:
        """Its resident memory."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmRSS")).split()[1])

    # Its end

    def ended(self, seconds: float = WAIT) -> int:
        """Wait for the process that was started here to end; gives its exit status (-N: signal N)."""
        return self.process.wait(seconds)

    def gone(self, seconds: float = WAIT) -> None:
        """Wait for the server itself to end, daemonised or not."""
        if self._daemon is None:
            self.ended(seconds)
        until(lambda: not alive(self.pid), "the end of the server", seconds)

    def send_signal(self, number: int) -> None:
        """Send the server a signal."""
        os.kill(self.pid, number)

    def stop(self, number: int = signal.SIGTERM, seconds: float = WAIT) -> int:
        """Send it a signal and wait for its end; gives its exit status."""
        self.send_signal(number)
        return self.ended(seconds)

    def close(self) -> None:
        """Leave nothing of it behind."""
        if self.daemonised and self._daemon is None and self._pid_text().isdigit():
            self._daemon = int(self._pid_text())
        if self._daemon is not None and alive(self._daemon):
            os.kill(self._daemon, signal.SIGKILL)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self._made is not None:
            self._made.cleanup()

    # Its status channel

    def http(self, request: bytes, host: str = LOOPBACK) -> bytes:
        """The whole answer to a request, up to the end of the stream."""
        with socket.create_connection((host, self.port), WAIT) as client:
            client.sendall(request)
            return read_all(client)

    def state(self) -> dict[str, Any]:
        """``/state.json``, now."""
        state: dict[str, Any] = json.loads(body_of(self.http(b"GET /state.json HTTP/1.0\r\n\r\n")))
        return state

    def state_is(self, seconds: float = WAIT, **wanted: Any) -> None:
        """Wait until the state has these values."""
        until(lambda: {name: self.state()[name] for name in wanted} == wanted, f"state {wanted}", seconds)


def head_of(answer: bytes) -> str:
    """An HTTP answer's status line and headers."""
    return answer.partition(b"\r\n\r\n")[0].decode("ascii")


def body_of(answer: bytes) -> bytes:
    """An HTTP answer's body."""
    return answer.partition(b"\r\n\r\n")[2]


def read_all(client: socket.socket) -> bytes:
    """All bytes up to the end of the stream; a reset raises."""
    parts = []
    while part := client.recv(65536):
        parts.append(part)
    return b"".join(parts)


def ends(client: socket.socket, seconds: float = WAIT) -> bool:
    """Whether the server closes this connection, by FIN or by RST, without a further byte."""
    client.settimeout(seconds)
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def reset(client: socket.socket) -> None:
    """Close with a RST."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


class Client:
    """A host's side of a real join connection, blocking."""

    def __init__(self, port: int, address: str = LOOPBACK, *, token: bytes | None = None, version: int = 4) -> None:
        self.talk = SimulatedClient(version, token)
        self.socket = socket.create_connection((address, port), WAIT)
        self._messages: deque[JoinMessage] = deque()

    def join(self, host: str, devices: int = 1, **fields: Any) -> JoinMessage:
        """Send a hello; gives the answer."""
        self.socket.sendall(self.talk.hello(make_hello(host, devices, **fields)))
        return self.next()

    def next(self) -> JoinMessage:
        """The next message; EOFError at the end of the stream."""
        while not self._messages:
            data = self.socket.recv(65536)
            if not data:
                raise EOFError("the controller closed the connection")
            self._messages.extend(self.talk.feed(data))
        return self._messages.popleft()

    def rest(self) -> list[JoinMessage]:
        """All messages up to the end of the stream."""
        messages = []
        while True:
            try:
                messages.append(self.next())
            except EOFError:
                return messages

    def exit_all(self, code: int = 0) -> None:
        """Report the exit of each of its ranks."""
        for rank in self.talk.ranks:
            self.socket.sendall(self.talk.exited(rank, code))

    def close(self) -> None:
        """Close with a FIN."""
        self.socket.close()


class _Closable(Protocol):
    def close(self) -> None: ...


Shareable = TypeVar("Shareable", bound=_Closable)
_shared: dict[type, _Closable] = {}


def shared(test: unittest.TestCase, make: Callable[[], Shareable]) -> Shareable:
    """One for all tests of a class; closed when another class's begin, or at the end of this process.

    Trial runs no ``setUpClass`` of unittest's test cases, so this is called from ``setUp``.
    """
    owner = type(test)
    if owner not in _shared:
        _close_shared()
        _shared[owner] = make()
    return cast(Shareable, _shared[owner])


@atexit.register
def _close_shared() -> None:
    while _shared:
        _shared.popitem()[1].close()


class ProcessTestCase(unittest.TestCase):
    """A test of real processes: what it starts is killed, and no log may show a traceback."""

    def launch(self, *options: str, **how: Any) -> Twistd:
        """A controller for this test alone, which may not listen yet."""
        controller = Twistd(*options, **how)
        self.addCleanup(controller.close)
        self.addCleanup(self.no_traceback, controller)
        return controller

    def share(self, *options: str, **how: Any) -> Twistd:
        """A controller that listens, for all tests of this class; its log may show no fault from now on."""
        controller = shared(self, lambda: Twistd(*options, **how).listening())
        # A thread writes the log: this is its last line of the start.
        controller.said("a world is formed")
        self.addCleanup(self.no_traceback, controller, len(controller.log))
        return controller

    def start(self, *options: str, **how: Any) -> Twistd:
        """A controller that listens, for this test alone."""
        return self.launch(*options, **how).listening()

    def no_traceback(self, controller: Twistd, since: int = 0) -> None:
        """Assert that the log (from the character ``since`` on) and the error stream show no fault of ours."""
        for text in (controller.log[since:], controller.stderr):
            for sign in ("Traceback", "Unhandled", "everything else goes on"):
                at = text.find(sign)
                if at >= 0:
                    self.fail(f"the log has a fault: {text[max(0, at - 200) : at + 1500]}")

    def connect(self, controller: Twistd, address: str = LOOPBACK, data: bytes = b"") -> socket.socket:
        """A raw connection that has sent ``data``; closed at the end of the test."""
        client = socket.create_connection((address, controller.port), WAIT)
        self.addCleanup(client.close)
        if data:
            client.sendall(data)
        return client

    def dial(self, controller: Twistd, address: str = LOOPBACK, **talk: Any) -> Client:
        """A client for the join channel; closed at the end of the test."""
        client = Client(controller.port, address, **talk)
        self.addCleanup(client.close)
        return client

    def joined(self, controller: Twistd, host: str, devices: int = 1, **fields: Any) -> Client:
        """A host that was accepted."""
        client = self.dial(controller)
        answer = client.join(host, devices, **fields)
        self.assertEqual(type(answer).__name__, "Accept", answer)
        return client
