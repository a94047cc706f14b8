"""Real ``flodl-tw`` processes, the ranks that they start, and a launcher's side of the join talk by hand.

A command has a folder of its own, and what it started is killed with it at the
end of the test: the processes of its children's sessions, by their ids.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flodl_tw.core.messages import (
    Abort,
    Accept,
    Hello,
    JoinMessage,
    Reject,
    WorldFormed,
    decode_join,
    encode_join,
)
from flodl_tw.core.wire import JOIN_MAGIC, ZERO_KEY, FrameReader
from tests.loopback.process import LOOPBACK, ProcessTestCase, alive, until

PATIENCE = 120.0
"""Seconds for whatever a command does that has no limit of its own, on the slowest machine."""
TOKEN = "0123456789abcdef" * 2
SALT = bytes(range(16))
PYTHON = (sys.executable, "-I", "-S", "-c")
"""The start of a rank that is a small program in Python."""
SH = ("sh", "-c")
BASE = {"PATH": os.environ.get("PATH", os.defpath), "HOME": "/nonexistent", "LANG": "C.UTF-8"}
"""What every command has in its environment, and nothing else of the tests' own."""


def script(name: str) -> str:
    """A console script of this project."""
    return str(Path(sysconfig.get_path("scripts")) / name)


# Processes as /proc shows them


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the command: state, parent, group, session...; none where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().decode("latin-1").rpartition(")")[2].split()
    except OSError:
        return []


def begun(pid: int) -> int:
    """When the process was started, in ticks; 0 where it is gone."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def processes() -> dict[int, list[str]]:
    """Every process, with its fields."""
    found = {int(name): _stat(int(name)) for name in os.listdir("/proc") if name.isdecimal()}
    return {pid: fields for pid, fields in found.items() if fields}


def is_stopped(pid: int) -> bool:
    """Whether the process has stopped, as by SIGSTOP."""
    return _stat(pid)[:1] == ["T"]


def children_of(pid: int, *, zombies: bool = False) -> list[int]:
    """The children of a process; or those that wait to be reaped."""
    return [child for child, fields in processes().items() if int(fields[1]) == pid and (fields[0] == "Z") is zombies]


def in_sessions(sessions: Iterable[int]) -> list[int]:
    """The processes of these sessions that run."""
    wanted = set(sessions)
    return [pid for pid, fields in processes().items() if int(fields[3]) in wanted and fields[0] not in "ZX"]


def kill_all(seen: Mapping[int, int]) -> None:
    """Kill processes by id, each if it is still the one that had begun then."""
    for pid, then in seen.items():
        if begun(pid) == then and alive(pid):
            os.kill(pid, signal.SIGKILL)


# The command


class Command:
    """One real command, from its start to its end.

    ``stdin`` and ``stdout`` are descriptors in the place of nothing and of its output file, ``wrapped`` the
    start of a command line that becomes it.
    """

    def __init__(
        self,
        *words: str,
        environ: Mapping[str, str] | None = None,
        stdout: int | None = None,
        stdin: int = subprocess.DEVNULL,
        name: str = "flodl-tw",
        wrapped: tuple[str, ...] = (),
    ) -> None:
        self._made = tempfile.TemporaryDirectory(prefix="flodl-tw-")
        self.folder = Path(self._made.name)
        self._out, self._err = self.folder / "out", self.folder / "err"
        self.started_at = time.monotonic()
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [*wrapped, script(name), *words],
                stdin=stdin,
                stdout=out if stdout is None else stdout,
                stderr=err,
                cwd=self.folder,
                env={**BASE, **(environ or {})},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The command's process."""
        return self.process.pid

    @property
    def out(self) -> bytes:
        """Its output so far."""
        return self._out.read_bytes()

    @property
    def err(self) -> str:
        """Its errors so far."""
        return self._err.read_bytes().decode("utf-8", "backslashreplace")

    def lines(self, text: str) -> list[str]:
        """The lines of its errors that have ``text``."""
        return [line for line in self.err.splitlines() if text in line]

    def said(self, text: str, seconds: float = PATIENCE) -> str:
        """Wait for a line of its errors that has ``text``; gives the first."""
        until(lambda: self.lines(text) or self.process.poll() is not None, text, seconds)
        found = self.lines(text)
        if not found:
            raise AssertionError(f"it ended with {self.process.returncode} without {text!r}: {self.err}")
        return found[0]

    def printed(self, text: bytes, seconds: float = PATIENCE) -> None:
        """Wait until its output has ``text``."""
        until(lambda: text in self.out, repr(text), seconds)

    def ended(self, seconds: float = PATIENCE) -> int:
        """Wait for its end; gives its exit status (-N: signal N)."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end within {seconds} s: {self.err}") from None

    def send_signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    @property
    def elapsed(self) -> float:
        """Seconds since its start."""
        return time.monotonic() - self.started_at

    def children(self) -> list[int]:
        """Its children: the guardian and the ranks that run."""
        return children_of(self.pid)

    def guardian(self) -> int:
        """Its guardian, once it has one."""
        return until(lambda: next(filter(_guards, self.children()), 0), "a guardian", PATIENCE)

    def resident_mib(self) -> float:
        """Its resident memory."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024

    def close(self) -> None:
        """Leave nothing of it behind."""
        if self.process.poll() is None:
            left = in_sessions([self.pid, *self.children()])
            seen = {pid: begun(pid) for pid in left}
            self.process.kill()
            self.process.wait()
            kill_all(seen)
        self._made.cleanup()


def _guards(pid: int) -> bool:
    try:
        return b"guardian.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


# A launcher that is not ours


def envelope(host: str, ranks: list[int], world_size: int, **more: Any) -> dict[str, Any]:
    """What flodl's own launcher tells one host of a world of its own; its address is not the one that was dialed."""
    return {
        "controller": {"host": "192.0.2.1", "port": 1},
        "world_size": world_size,
        "num_workers": 1,
        "worker": {
            "host": host,
            "ranks": ranks,
            "local_devices": list(range(len(ranks))),
            "nccl_socket_ifname": "",
            "path": "",
        },
        "salt": SALT.hex(),
        **more,
    }


def hexed(value: Any) -> str:
    """Hex of JSON."""
    return json.dumps(value).encode().hex()


def unhexed(text: str) -> Any:
    """What hex of JSON holds."""
    return json.loads(bytes.fromhex(text))


class Launched:
    """One host's connection as a launcher sees it; its hello has been read."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._reader = FrameReader(max_payload=1 << 20)
        self._messages: deque[JoinMessage] = deque()
        magic = connection.recv(4, socket.MSG_WAITALL)
        assert magic == JOIN_MAGIC, magic
        hello = self.next()
        assert isinstance(hello, Hello), hello
        self.hello = hello

    def next(self) -> JoinMessage:
        """The next message; EOFError at the end of the stream."""
        while not self._messages:
            data = self.socket.recv(65536)
            if not data:
                raise EOFError("the agent closed the connection")
            self._reader.feed(data)
            while (frame := self._reader.next_frame()) is not None:
                self._messages.append(decode_join(frame.payload, frame.version))
        return self._messages.popleft()

    def rest(self) -> list[JoinMessage]:
        """All messages up to the end of the stream."""
        messages = []
        while True:
            try:
                messages.append(self.next())
            except EOFError:
                return messages

    def accept(self, *ranks: int) -> None:
        """Let it in, under open admission."""
        self.socket.sendall(encode_join(ZERO_KEY, 4, Accept(ranks, SALT.hex(), 60)))

    def reject(self, reason: str) -> None:
        """Refuse it, and close."""
        self.socket.sendall(encode_join(ZERO_KEY, 4, Reject(reason)))
        self.close()

    def form(self, ranks: list[int], world_size: int = 4, relay: Any = None, **more: Any) -> None:
        """Tell it of its world; ``more`` are keys of its envelope."""
        told = envelope(self.hello.host, ranks, world_size, **more)
        formed = WorldFormed(hexed(told), None if relay is None else hexed(relay))
        self.socket.sendall(encode_join(SALT, 4, formed))

    def run(self, count: int = 1, relay: Any = None) -> None:
        """Let it in, with a world of its own."""
        self.accept(*range(count))
        self.form(list(range(count)), count, relay)

    def abort(self, reason: str) -> None:
        """End its run."""
        self.socket.sendall(encode_join(SALT, 4, Abort(reason)))

    def close(self) -> None:
        """Close with a FIN."""
        self.socket.close()


class Launcher:
    """A launcher by hand: it listens, and does with each host what the test says."""

    def __init__(self) -> None:
        self._listening = socket.create_server((LOOPBACK, 0), backlog=64)
        self._listening.settimeout(PATIENCE)
        self.port: int = self._listening.getsockname()[1]
        self._connections: list[socket.socket] = []

    def host(self) -> Launched:
        """The next host that dials."""
        connection, _ = self._listening.accept()
        connection.settimeout(PATIENCE)
        self._connections.append(connection)
        return Launched(connection)

    def dialed(self) -> bool:
        """Whether a host has dialed that was not taken yet."""
        return bool(select.select([self._listening], [], [], 0)[0])

    def hosts(self, count: int) -> dict[str, Launched]:
        """So many of them, by name."""
        found = [self.host() for _ in range(count)]
        return {each.hello.host: each for each in found}

    def close(self) -> None:
        """Leave nothing open."""
        for connection in (self._listening, *self._connections):
            connection.close()


class AgentTestCase(ProcessTestCase):
    """A test of real commands: what they start ends with them, and none may show a fault of its own."""

    def folder(self) -> Path:
        """A new folder, for what ranks tell."""
        made = tempfile.TemporaryDirectory(prefix="flodl-tw-")
        self.addCleanup(made.cleanup)
        return Path(made.name)

    def command(self, *words: str, **how: Any) -> Command:
        """Start one."""
        command = Command(*words, **how)
        self.addCleanup(command.close)
        self.addCleanup(self._no_fault, command)
        return command

    def join(self, port: int, host: str, *words: str, program: tuple[str, ...] = ("true",), **how: Any) -> Command:
        """Start an agent; with one rank, unless ``words`` say more."""
        ranks = () if {"--nproc", "--devices"} & set(words) else ("--nproc", "1")
        return self.command("join", f"{LOOPBACK}:{port}", "--host", host, *ranks, *words, "--", *program, **how)

    def launcher(self) -> Launcher:
        """Start a launcher that is not ours."""
        launcher = Launcher()
        self.addCleanup(launcher.close)
        return launcher

    def killed_at_the_end(self, *pids: int) -> None:
        """See to it that these processes, of a command that the test kills, don't outlive the test."""
        self.addCleanup(kill_all, {pid: begun(pid) for pid in pids})

    def all_gone(self, pids: Iterable[int], seconds: float = PATIENCE) -> None:
        """Wait until none of these runs."""
        wanted = list(pids)
        until(lambda: not any(map(alive, wanted)), f"the end of {wanted}", seconds)

    def file(self, path: Path, seconds: float = PATIENCE) -> str:
        """The text of a file that a rank writes in one go, once it is there."""
        return until(lambda: path.exists() and path.read_text(), str(path), seconds)

    def _no_fault(self, command: Command) -> None:
        for sign in ("Traceback", "Unhandled", "fault of the program"):
            self.assertNotIn(sign, command.err)
