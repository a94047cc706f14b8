"""The hosts' side: the join talk in memory, and a host without GPUs that joins over a real connection."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.endpoints import connectProtocol
from twisted.internet.interfaces import IDelayedCall, IReactorTime, IStreamClientEndpoint
from twisted.python.failure import Failure

from flodl_tw.agent.assignment import Assignment, read_world
from flodl_tw.agent.link import Event, JoinLink, LinkEnded
from flodl_tw.agent.outcome import MAX_REASON_CHARS, aborted
from flodl_tw.channels.peeker import internet_address
from flodl_tw.core.join_client import JoinClient
from flodl_tw.core.log_text import shortened
from flodl_tw.core.messages import Abort, Accept, Hello, JoinMessage, Reject, WorldFormed
from flodl_tw.limits import Limits
from flodl_tw.once import Once


def make_hello(host: str = "gpu-a", devices: int = 1, **fields: Any) -> Hello:
    """A hello that a controller with default settings admits; ``fields`` replace any of its own."""
    hello = Hello(
        host=host,
        local_devices=bytes(range(devices)),
        gpus=("NVIDIA H100 (80GB, sm_90)",) * devices,
        libtorch="precompiled/cu128",
        dataset_sig=bytes(32),
    )
    return replace(hello, **fields)


class SimulatedClient(JoinClient):
    """The agent's side of the join talk, which keeps the world's envelope (None before WorldFormed)."""

    def __init__(self, version: int = 4, token: bytes | None = None) -> None:
        super().__init__(version, token)
        self.envelope: dict[str, object] | None = None

    def feed(self, data: bytes) -> list[JoinMessage]:
        messages = super().feed(data)
        for message in messages:
            if isinstance(message, WorldFormed):
                self.envelope = json.loads(bytes.fromhex(message.envelope_hex))
        return messages


class HostEndedError(Exception):
    """A simulated host ended before its ranks did.  ``event`` is what ended it; the text says it for people."""

    def __init__(self, text: str, event: Event) -> None:
        super().__init__(text)
        self.event = event


class SimulatedHost(JoinLink):
    """A host without GPUs and processes: it joins, "trains" for a while, reports its ranks' exits, and leaves.

    It joins a controller over any client endpoint::

        endpoint = clientFromString(reactor, "tcp:127.0.0.1:29500")
        host = await SimulatedHost(reactor, make_hello("gpu-a", devices=8)).join(endpoint)

    and goes on by itself from there.  It is an ordinary protocol, too:
    ``endpoint.connect(Factory.forProtocol(partial(SimulatedHost, reactor, hello)))``.

    The hello goes out with the connection.  ``train_secs`` after the world has
    formed every rank exits with ``code`` (-N for signal N), and the connection
    is closed; with None it trains until ``finish`` is called.  ``token`` (16
    bytes) is for a controller with credentialed admission.

    ``when_accepted``, ``when_formed`` and ``when_ended`` give each caller a
    Deferred of its own, before the fact or after it.  None of them has a
    deadline: use ``addTimeout``.  A host never dials again, and has no timer
    left once its connection is gone.
    """

    def __init__(
        self,
        clock: IReactorTime,
        hello: Hello,
        *,
        token: bytes | None = None,
        train_secs: float | None = 1.0,
        code: int = 0,
        limits: Limits | None = None,
    ) -> None:
        super().__init__(clock, limits or Limits(), hello, token)
        self.world: Assignment | None = None
        """What it was told of the world; None before that has formed."""
        self.finished = False
        """Whether its ranks have exited."""
        self.failure: HostEndedError | None = None
        """What ended it, unless it finished."""
        self._train_secs = train_secs
        self._code = code
        self._training: IDelayedCall | None = None
        self._accepted = Once[Accept]()
        self._formed = Once[Assignment]()
        self._ended = Once[HostEndedError | None]()
        self.deliver_to(self._heard)

    def join(self, endpoint: IStreamClientEndpoint) -> Deferred[SimulatedHost]:
        """Connect; fires with this host once it is accepted.

        Fails with the endpoint's error where there is no connection, and with
        HostEndedError where the controller refuses the host or closes.
        """
        connected = connectProtocol(endpoint, self).addCallback(lambda _: self.when_accepted())
        joined: Deferred[SimulatedHost] = connected.addCallback(lambda _: self)
        return joined

    def when_accepted(self) -> Deferred[Accept]:
        """Fires with the Accept, whose ``ranks`` are this host's; HostEndedError where it ends before."""
        return self._accepted.wait()

    def when_formed(self) -> Deferred[Assignment]:
        """Fires with what it is told of the world; HostEndedError where it ends before."""
        return self._formed.wait()

    def when_ended(self) -> Deferred[HostEndedError | None]:
        """Fires with None once it has finished and its connection is gone, and else with what ended it; never fails."""
        return self._ended.wait()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Its ranks, none before the Accept."""
        return self.talk.ranks

    def finish(self) -> None:
        """Have every rank exit now, and leave."""
        self._stop_training()
        if not self.finished:
            self.finished = True
            for rank in self.ranks:
                self.report(rank, self._code)
            self.close()

    def connectionMade(self) -> None:
        super().connectionMade()
        self.greet()

    def _heard(self, event: Event) -> None:
        if self.failure is not None:
            return
        match event:
            case Accept():
                self._accepted.happened(event)
            case WorldFormed() if self.ranks and self.world is None:
                self._told(event)
            case LinkEnded(fault=False) if self.finished:
                self._ended.happened(None)
            case _:
                self._over(HostEndedError(self._why(event), event))

    def _told(self, formed: WorldFormed) -> None:
        count, dialed = len(self._hello.local_devices), internet_address(self.transport.getPeer()) or ("", 0)
        try:
            self.world = read_world(formed, devices=count, dialed=dialed)
        except ValueError as error:
            self._over(HostEndedError(f"the controller's world cannot be used: {error}", formed))
            return
        if self._train_secs is not None:
            self._training = self._clock.callLater(self._train_secs, self.finish)
        self._formed.happened(self.world)

    def _why(self, event: Event) -> str:
        host = self._hello.host
        step = "its ranks had ended" if self.world else "the world had formed" if self.ranks else "it was accepted"
        match event:
            case Reject():
                return f"{host} was refused: {shortened(event.reason, MAX_REASON_CHARS)}"
            case Abort():
                return aborted(event.reason).text
            case LinkEnded(fault=True):
                return f"what {host} dialed does not answer as a controller does: {event.how}"
            case LinkEnded():
                cause = "" if self.ranks else "; most likely its token is not the run's"
                return f"the controller ended the link of {host} before {step} ({event.how}){cause}"
        return f"the controller sent {host} {type(event).__name__} before {step}, which is out of its turn"

    def _over(self, why: HostEndedError) -> None:
        self.failure = why
        self._stop_training()
        self.close()
        self._ended.happened(why)
        self._accepted.happened(Failure(why))
        self._formed.happened(Failure(why))

    def _stop_training(self) -> None:
        if self._training is not None and self._training.active():
            self._training.cancel()
