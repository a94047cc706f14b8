"""The server: the one place where the parts of a controller are joined, for ``twistd``, ``flodl-tw run``,
tests, and any Twisted application.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import Any, Final

from twisted.application.service import MultiService
from twisted.internet import tcp
from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import (
    IAddress,
    IListeningPort,
    IReactorFDSet,
    IReactorSocket,
    IReactorTime,
    IStreamServerEndpoint,
)
from twisted.logger import Logger
from twisted.python.failure import Failure

from flodl_tw import sockets
from flodl_tw.channels.capacity import Capacity
from flodl_tw.channels.dead_peer import watched_transport
from flodl_tw.channels.forward import ForwardFactory
from flodl_tw.channels.front_door import FrontDoor
from flodl_tw.channels.join import JoinFactory
from flodl_tw.channels.peeker import ChannelFactory, internet_address
from flodl_tw.channels.rendezvous import RendezvousFactory
from flodl_tw.channels.store import StoreFactory
from flodl_tw.controller import Controller
from flodl_tw.core.run_settings import AfterRun
from flodl_tw.core.wire import CONTROL_MAGIC, DATA_MAGIC, HTTP_MAGICS, JOIN_MAGIC, RENDEZVOUS_MAGIC, STORE_MAGIC
from flodl_tw.core.world import World
from flodl_tw.deadlines import after
from flodl_tw.once import Once
from flodl_tw.run import RunEnd
from flodl_tw.settings import ControllerSettings
from flodl_tw.web.factory import StatusFactory

FORWARDED: Final = {"rendezvous": RENDEZVOUS_MAGIC, "data": DATA_MAGIC, "control": CONTROL_MAGIC}
"""The channels that may have a backend, by the name of their option."""
_log = Logger()


class ControllerServer(MultiService):
    """A controller on one port: a service, which opens its first window when it listens.

    ``listen`` is a stream socket that is bound and listens already, which it
    takes over, or an endpoint.  Admission is credentialed where ``settings``
    has a token, and else open: who reaches the port may join then.  Stopping
    it tells every joined host, and closes every connection within 3 s.
    ``settings.after_run`` decides on a next run alone: to stop the server, or
    the process, when a run is over is its owner's, by ``when_over``.
    """

    def __init__(
        self, reactor: IReactorTime, settings: ControllerSettings, listen: socket.socket | IStreamServerEndpoint
    ) -> None:
        super().__init__()
        self._reactor = reactor
        self._settings = settings
        self._listen = listen
        self.controller = Controller(
            reactor, settings.run, token=settings.token, rearm=settings.after_run is AfterRun.REARM
        )
        self.capacity = Capacity.of_descriptors(reactor, sockets.descriptor_limit())
        self.front = FrontDoor(
            reactor,
            settings.limits,
            self._routes,
            max_pending=settings.max_pending,
            max_pending_per_host=settings.max_pending_per_host,
            capacity=self.capacity,
        )
        self._port: IListeningPort | None = None
        self._opening: Deferred[IListeningPort] | None = None
        self._bound: Once[IAddress] = Once()

    @property
    def port(self) -> int:
        """The TCP port that it listens on; RuntimeError while it listens on none."""
        address = None if self._port is None else internet_address(self._port.getHost())
        if address is None:
            raise RuntimeError("the controller does not listen on a TCP port, or not yet: wait for when_listening()")
        return address[1]

    def join_endpoint(self) -> str | None:
        """Where workers dial, for people; None where it does not listen on a TCP port."""
        address = None if self._port is None else internet_address(self._port.getHost())
        return None if address is None else self._settings.join_endpoint(*address)

    def state(self) -> dict[str, Any]:
        """The state of the current run, with the keys of ``/state.json``."""
        state: dict[str, Any] = json.loads(self.controller.run.state_json())
        return state

    def when_listening(self) -> Deferred[IAddress]:
        """Fires with the address that it listens on; with the failure where it cannot."""
        return self._bound.wait()

    def when_formed(self) -> Deferred[World]:
        """Fires with the current run's world; with ``NoWorldError`` where that run ends without one."""
        return self.controller.when_formed()

    def when_over(self) -> Deferred[RunEnd]:
        """Fires with how the current run ended: when every host has left it, or the server is stopped."""
        return self.controller.when_over()

    def startService(self) -> None:
        super().startService()
        self._opening = self._open()
        self._opening.addCallbacks(self._listening, self._not_listening)

    def stopService(self) -> Deferred[None]:
        stopped = super().stopService()
        return Deferred.fromCoroutine(self._stop(stopped))

    def _routes(self, front: FrontDoor) -> Mapping[bytes, ChannelFactory]:
        """Which first bytes lead to which channel: the table of ``tap.md``."""
        settings, controller = self._settings, self.controller
        names = (*settings.allowed_hosts, *([settings.advertised] if settings.advertised else ()))
        self._status = StatusFactory(front, controller, self.join_endpoint, names)
        routes: dict[bytes, ChannelFactory] = {
            JOIN_MAGIC: JoinFactory(front, controller),
            **dict.fromkeys(HTTP_MAGICS, self._status),
        }
        if settings.native_rendezvous:
            routes[RENDEZVOUS_MAGIC] = RendezvousFactory(front, controller)
        if settings.run.store is not None:
            routes[STORE_MAGIC] = StoreFactory(front, controller)
        for name, endpoint in settings.backends.items():
            routes[FORWARDED[name]] = ForwardFactory(front, IReactorFDSet(self._reactor), name, endpoint)
        return routes

    def _open(self) -> Deferred[IListeningPort]:
        if isinstance(self._listen, socket.socket):
            return succeed(self._adopt(self._listen))
        return self._listen.listen(self.front)

    def _adopt(self, bound: socket.socket) -> IListeningPort:
        """Accept from a socket that listens, with connections whose silence is told from a reset."""
        port = IReactorSocket(self._reactor).adoptStreamPort(bound.fileno(), bound.family, self.front)
        if isinstance(port, tcp.Port):
            port.transport = watched_transport(self._settings.limits)
        # The reactor works on a duplicate.
        bound.close()
        return port

    def _listening(self, port: IListeningPort) -> None:
        self._port = port
        self.front.listening(port)
        self.controller.start()
        self._bound.happened(port.getHost())
        # Whoever waits for the port need not wait for this, too.
        after(self._reactor, 0, self._status.warm_up)

    def _not_listening(self, failure: Failure) -> None:
        _log.failure("the controller cannot listen", failure)
        self.controller.stop(f"the controller cannot listen: {failure.getErrorMessage()}")
        self._bound.happened(failure)

    async def _stop(self, children: Deferred[object]) -> None:
        # The hosts are told before the door closes on them.
        self.controller.stop()
        if self._opening is not None:
            self._opening.cancel()
        stopped = None if self._port is None else self._port.stopListening()
        await self.front.close_all()
        if stopped is not None:
            await stopped
        await children
