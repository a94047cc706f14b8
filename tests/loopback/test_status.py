"""An answer of the status channel that leaves in parts, as the reactor paces them."""

from __future__ import annotations

import socket
from collections.abc import Callable

from twisted.internet.task import deferLater

from flodl_tw.channels.front_door import FrontDoor
from flodl_tw.limits import Limits
from flodl_tw.testing import ClockedController
from flodl_tw.web.factory import StatusFactory
from tests.loopback.process import WAIT
from tests.pumped import window
from tests.waiting import ReactorTestCase, waits

STATE = b"GET /state.json HTTP/1.1\r\nHost: ctl:29500\r\n\r\n"


class LargeAnswerTests(ReactorTestCase):
    """An answer that leaves in parts; the reactor paces them, so this needs a socket."""

    @waits
    async def test_a_client_that_leaves_during_a_large_answer_is_no_error(self) -> None:
        from twisted.internet import reactor

        clocked = ClockedController(window(min_rank_start=1 << 20))
        for host in range(3000):
            clocked.dial().join(host=f"h{host}", gpus=("x" * 250,) * 4)
        size = len(clocked.controller.run.state_json())
        self.assertGreater(size, 3_000_000)
        front = FrontDoor(reactor, Limits())
        status = StatusFactory(front, clocked.controller)
        front.routes = {b"GET ": status}

        async def until(happened: Callable[[], bool]) -> None:
            for _ in range(round(WAIT / 0.01)):
                if happened():
                    return
                await deferLater(reactor, 0.01)
            self.fail(f"it did not happen within {WAIT} s")

        port = reactor.listenTCP(0, front, interface="127.0.0.1")
        try:
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.settimeout(WAIT)
                client.connect(("127.0.0.1", port.getHost().port))
                client.sendall(STATE)
                await until(lambda: len(front) == 1 and not front.pending)
            await until(lambda: not len(front))
        finally:
            await port.stopListening()
            await front.close_all()
        self.assertEqual([failure.getErrorMessage() for failure in self.flushLoggedErrors()], [])
