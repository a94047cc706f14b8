"""Which first bytes lead to which channel: the table of ``tap.md``, as objects."""

from __future__ import annotations

from flodl_tw.controller import Controller
from flodl_tw.core.wire import HTTP_MAGICS, JOIN_MAGIC
from flodl_tw.join import JoinChannel
from flodl_tw.mux import FrontDoor, Route
from flodl_tw.web.status import Status, StatusChannel


def channels(
    front: FrontDoor, controller: Controller, port: int, allowed_hosts: tuple[str, ...] = ()
) -> dict[bytes, Route]:
    """The routes of ``front``.  ``port`` is where ranks are told to dial."""
    status = StatusChannel(front, Status(controller, front.ended, allowed_hosts))
    return {JOIN_MAGIC: JoinChannel(front, controller, port), **dict.fromkeys(HTTP_MAGICS, status)}
