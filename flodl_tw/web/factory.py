"""The route of the HTTP magics.  The web server behind it is loaded when it is first needed, or asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial

from flodl_tw.channels.front_door import FrontDoor
from flodl_tw.channels.peeker import Channel, Peeker
from flodl_tw.controller import Controller
from flodl_tw.limits import MAX_ANSWERS


class StatusFactory:
    """What all status connections share.

    ``join_endpoint`` says where workers dial, and ``allowed_hosts`` are names that a request's ``Host`` may have.
    """

    def __init__(
        self,
        front: FrontDoor,
        controller: Controller,
        join_endpoint: Callable[[], str | None] = lambda: None,
        allowed_hosts: tuple[str, ...] = (),
    ) -> None:
        self._front = front
        self._controller = controller
        self._join_endpoint = join_endpoint
        self._allowed_hosts = allowed_hosts

    def warm_up(self) -> None:
        """Load the web server now, which takes some 0.2 s, so that the first request does not wait for it."""
        self._protocol  # noqa: B018  it is made when it is looked at

    def buildProtocol(self, peeker: Peeker) -> Channel:
        """The owner of one connection."""
        return self._protocol(peeker)

    @cached_property
    def _protocol(self) -> Callable[[Peeker], Channel]:
        # A controller listens in half the time while these are not loaded.
        from twisted.web.server import Site

        from flodl_tw.web.connection import StatusProtocol
        from flodl_tw.web.resource import StatusResource
        from flodl_tw.web.under_way import AnswersUnderWay

        status = StatusResource(self._controller, self._front.ended, self._join_endpoint, self._allowed_hosts)
        under_way = AnswersUnderWay(min(MAX_ANSWERS, max(1, self._front.capacity.most // 4)))
        return partial(StatusProtocol, Site(status.app.resource(), reactor=self._front.clock), under_way)
