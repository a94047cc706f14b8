"""Which first bytes lead to which channel: the table of ``tap.md``, as objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from flodl_tw.channels.forward import ForwardFactory
from flodl_tw.channels.front_door import FrontDoor, Route
from flodl_tw.channels.join import JoinFactory
from flodl_tw.channels.rendezvous import RendezvousFactory
from flodl_tw.channels.store import StoreFactory
from flodl_tw.controller import Controller
from flodl_tw.core.wire import CONTROL_MAGIC, DATA_MAGIC, HTTP_MAGICS, JOIN_MAGIC, RENDEZVOUS_MAGIC, STORE_MAGIC
from flodl_tw.web.resource import StatusFactory, StatusResource

FORWARDED: Final = {"rendezvous": RENDEZVOUS_MAGIC, "data": DATA_MAGIC, "control": CONTROL_MAGIC}
"""The channels that may have a backend, by the name of their option."""


def channels(
    front: FrontDoor,
    controller: Controller,
    port: int,
    *,
    allowed_hosts: tuple[str, ...] = (),
    native_rendezvous: bool = True,
    backends: Mapping[str, str] | None = None,
    reactor: Any = None,
) -> dict[bytes, Route]:
    """The routes of ``front``.

    ``port`` is where ranks are told to dial.  ``backends`` maps names of
    ``FORWARDED`` to client endpoint descriptions, which ``reactor`` connects.
    """
    status = StatusFactory(front, StatusResource(controller, front.ended, allowed_hosts))
    routes: dict[bytes, Route] = {
        JOIN_MAGIC: JoinFactory(front, controller, port),
        **dict.fromkeys(HTTP_MAGICS, status),
    }
    if native_rendezvous:
        routes[RENDEZVOUS_MAGIC] = RendezvousFactory(front, controller)
    if controller.settings.store is not None:
        routes[STORE_MAGIC] = StoreFactory(front, controller)
    for name, endpoint in (backends or {}).items():
        routes[FORWARDED[name]] = ForwardFactory(front, reactor, name, endpoint)
    return routes
