"""A world forms before your eyes: the real controller through twistd, and three simulated hosts.

Shows what an operator sees before, during and after a run, and ends by itself
with the controller's exit status, which is 0.
"""

from __future__ import annotations

import os
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from twisted.internet import defer, task
from twisted.internet.endpoints import HostnameEndpoint, connectProtocol
from twisted.internet.protocol import ProcessProtocol
from twisted.internet.threads import deferToThread

from flodl_tw.testing import SimulatedHost, make_hello

HOSTS = (("gpu-a", 2), ("gpu-b", 1), ("gpu-c", 4))
RANKS = sum(devices for _, devices in HOSTS)
TRAIN_SECS = 1.5
START_LIMIT_SECS = 20


def say(line: str) -> None:
    print(line, flush=True)


class Controller(ProcessProtocol):
    """The twistd process: its log on our output, its exit status as a Deferred."""

    def __init__(self) -> None:
        self.ended: defer.Deferred[int] = defer.Deferred()

    def outReceived(self, data: bytes) -> None:
        for line in data.decode("utf-8", "replace").splitlines():
            # Without the time and Twisted's own lines: what the controller says.
            source, _, text = line.partition("] ")
            if "flodl_tw" in source:
                say(f"  controller | {text}")

    def errReceived(self, data: bytes) -> None:
        say(data.decode("utf-8", "replace").rstrip())

    def processExited(self, reason: Any) -> None:
        self.ended.callback(reason.value.exitCode if reason.value.exitCode is not None else 1)


def state(port: int) -> str:
    """What ``curl host:port/state.json`` prints."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/state.json", timeout=10) as answer:
        return str(answer.read().decode())


async def show(title: str, port: int) -> None:
    say(f"\n{title}\n$ curl 127.0.0.1:{port}/state.json\n{await deferToThread(state, port)}\n")


async def listening(reactor: Any, port_file: Path, process: Controller) -> int:
    """The port, once the controller has written it."""
    for _ in range(START_LIMIT_SECS * 20):
        if port_file.exists():
            return int(port_file.read_text())
        if process.ended.called:
            raise SystemExit("the controller did not start")
        await task.deferLater(reactor, 0.05)
    raise SystemExit(f"the controller did not listen within {START_LIMIT_SECS} s")


async def run(reactor: Any, folder: Path) -> int:
    options = ["--port", "0", "--port-file", "port", "--interface", "127.0.0.1", "--state-dir", "state"]
    options += ["--backend", "cpu", "--target-ranks", str(RANKS)]
    say(f"$ twistd -n flodl-controller {' '.join(options)}")
    process = Controller()
    twistd = str(Path(sys.executable).with_name("twistd"))
    arguments = [twistd, "-n", "--pidfile=", "flodl-controller", *options]
    spawned = reactor.spawnProcess(process, twistd, arguments, env=os.environ, path=str(folder))
    reactor.addSystemEventTrigger("before", "shutdown", lambda: spawned.pid and spawned.signalProcess("KILL"))
    port = await listening(reactor, folder / "port", process)
    await show("Before: the window is open and nobody is in.", port)
    say(f"Three hosts dial in, with {', '.join(str(devices) for _, devices in HOSTS)} devices.")
    for index, (name, devices) in enumerate(HOSTS):
        if index == len(HOSTS) - 1:
            await show("During: two hosts are in, the third is yet to come.", port)
        host = SimulatedHost(reactor, make_hello(name, devices), train_secs=TRAIN_SECS, say=lambda x: say(f"  {x}"))
        await connectProtocol(HostnameEndpoint(reactor, "127.0.0.1", port), host)
        await task.deferLater(reactor, 0.3)
    await show(f"The target of {RANKS} ranks is reached: the world has formed, and trains.", port)
    status = await process.ended
    say(f"\nAfter: every rank has exited with 0, so the controller ends with status {status}.")
    return status


async def main(reactor: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        status = await run(reactor, Path(folder))
    if status:
        raise SystemExit(status)


if __name__ == "__main__":
    task.react(lambda reactor: defer.Deferred.fromCoroutine(main(reactor)))
