"""A host that vanishes without closing: its packets are dropped, in network namespaces of this test's own."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import threading
import time
import unittest
from pathlib import Path

from flodl_tw.core.messages import Abort, Accept, WorldFormed
from tests.loopback.process import TWISTD, WAIT, Client, ProcessTestCase, until

CLONE_NEWNET = 0x40000000
NEAR, FAR = "169.254.77.1", "169.254.77.2"
SCALE = 0.1
BUDGET = 20.0
"""Seconds to find out: 3 by the deadlines at this scale, up to one and a half by the kernel's own timers, and what the
machine is slow; unscaled it would be 30."""


def why_not() -> str:
    """What is missing for network namespaces, or nothing."""
    for tool in ("unshare", "nsenter", "ip"):
        if shutil.which(tool) is None:
            return f"there is no {tool} (util-linux, iproute2)"
    if subprocess.run(["unshare", "-n", "ip", "link", "set", "lo", "up"], capture_output=True).returncode:
        return "network namespaces need more rights than this user has"
    return ""


class Namespace:
    """A network namespace, held by a process that does nothing else."""

    def __init__(self) -> None:
        self.holder = subprocess.Popen(["unshare", "-n", "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        own = os.readlink("/proc/self/ns/net")
        until(lambda: os.readlink(f"/proc/{self.holder.pid}/ns/net") != own, "the namespace")
        self.enter = ("nsenter", f"--net=/proc/{self.holder.pid}/ns/net")
        self.ip("link", "set", "lo", "up")

    def ip(self, *words: str) -> None:
        """Run ``ip`` inside."""
        subprocess.run([*self.enter, "ip", *words], check=True, capture_output=True, timeout=WAIT)

    def join_from(self, port: int, address: str) -> Client:
        """A client whose socket lives inside; a socket stays where it was made."""
        made: list[Client] = []

        def enter_and_connect() -> None:
            with Path(f"/proc/{self.holder.pid}/ns/net").open() as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            made.append(Client(port, address))

        # A namespace is entered by a thread, not by its process.
        thread = threading.Thread(target=enter_and_connect)
        thread.start()
        thread.join(WAIT)
        return made[0]

    def close(self) -> None:
        """Let go of it; its interfaces go with it."""
        self.holder.kill()
        self.holder.wait()
        assert self.holder.stdin is not None
        self.holder.stdin.close()


MISSING = why_not()


@unittest.skipIf(MISSING, MISSING)
class Silence(ProcessTestCase):
    """Two hosts in a world: one over loopback, one over a cable that is cut."""

    def setUp(self) -> None:
        self.near, self.far = Namespace(), Namespace()
        self.addCleanup(self.near.close)
        self.addCleanup(self.far.close)
        self.near.ip("link", "add", "near", "type", "veth", "peer", "name", "far", "netns", str(self.far.holder.pid))
        self.near.ip("address", "add", f"{NEAR}/24", "dev", "near")
        self.far.ip("address", "add", f"{FAR}/24", "dev", "far")
        self.near.ip("link", "set", "near", "up")
        self.far.ip("link", "set", "far", "up")
        self.controller = None

    def begin(self, *options: str) -> None:
        """A controller in the near namespace, and a host in each."""
        self.controller = self.start(
            "--open-admission", *options, interface="0.0.0.0", scale=SCALE, command=(*self.near.enter, *TWISTD)
        )
        port = int(self.controller.port_file.read_text())
        self.alive = self.near.join_from(port, "127.0.0.1")
        self.addCleanup(self.alive.close)
        self.vanishing = self.far.join_from(port, NEAR)
        self.addCleanup(self.vanishing.close)
        for host, name in ((self.alive, "gpu-alive"), (self.vanishing, "gpu-gone")):
            self.assertIsInstance(host.join(name, 2), Accept)

    def cut(self) -> float:
        """Cut the cable: nothing that is sent arrives, and nobody is told.  Gives the time."""
        self.far.ip("link", "set", "far", "down")
        return time.monotonic()

    def assert_lost(self, begun: float) -> None:
        """Assert that the other host hears of the loss in time, by name and as silence."""
        self.alive.socket.settimeout(BUDGET)
        (abort,) = self.alive.rest()
        took = time.monotonic() - begun
        assert isinstance(abort, Abort)
        self.assertIn("'gpu-gone'", abort.reason)
        self.assertIn("silent", abort.reason)
        self.assertNotIn("closed", abort.reason)
        self.assertLess(took, BUDGET)
        self.alive.close()
        assert self.controller is not None
        self.assertEqual(self.controller.ended(), 1)
        line = self.controller.said("lost host")
        self.assertIn("'gpu-gone'", line)
        self.assertIn("silent", line)

    def test_a_host_of_a_formed_world_that_vanishes_is_lost_and_named_as_silent(self) -> None:
        self.begin("--target-ranks", "4")
        for host in (self.alive, self.vanishing):
            self.assertIsInstance(host.next(), WorldFormed)
        # Its kernel has acknowledged all, so only a probe can find out.
        self.assert_lost(self.cut())

    def test_a_host_that_vanishes_with_data_on_its_way_is_lost_too(self) -> None:
        self.begin("--target-ranks", "5", "--join-timeout", "200")
        begun = self.cut()
        third = self.near.join_from(int(self.controller.port_file.read_text()), "127.0.0.1")  # type: ignore[union-attr]
        self.addCleanup(third.close)
        self.assertIsInstance(third.join("gpu-third"), Accept)
        # Its WorldFormed is written into the cut cable.
        self.assertIsInstance(self.alive.next(), WorldFormed)
        self.assertIsInstance(third.next(), WorldFormed)
        self.assertIsInstance(third.next(), Abort)
        third.close()
        self.assert_lost(begun)

    def test_a_host_that_vanishes_from_an_open_window_frees_its_name(self) -> None:
        self.begin("--min-rank-start", "100", "--join-timeout", "600")
        begun = self.cut()
        assert self.controller is not None
        line = self.controller.said("left while the window is open", BUDGET)
        self.assertIn("'gpu-gone'", line)
        self.assertIn("silent", line)
        self.assertGreater(time.monotonic() - begun, 1.0)
        back = self.near.join_from(int(self.controller.port_file.read_text()), "127.0.0.1")
        self.addCleanup(back.close)
        self.assertEqual(getattr(back.join("gpu-gone", 1), "ranks", None), (2,))

    def test_a_host_that_resets_its_link_is_not_called_silent(self) -> None:
        self.begin("--target-ranks", "4")
        for host in (self.alive, self.vanishing):
            self.assertIsInstance(host.next(), WorldFormed)
        linger = (1).to_bytes(4, "little") + bytes(4)
        self.vanishing.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.vanishing.close()
        (abort,) = self.alive.rest()
        assert isinstance(abort, Abort)
        self.assertIn("reset", abort.reason)
        self.assertNotIn("silent", abort.reason)
