"""The join channel: a hello and its answer, then the host's control link.

Thin on purpose: bytes become frames, frames become calls on a run, and what
the run says goes back as frames in the peer's own version.
"""

from __future__ import annotations

from twisted.internet.interfaces import ITransport
from twisted.logger import Logger, LogLevel
from twisted.python.failure import Failure

from flodl_tw import sockets
from flodl_tw.channels import dead_peer
from flodl_tw.channels.front_door import FrontDoor, Peeker
from flodl_tw.controller import Controller
from flodl_tw.core.addresses import classify
from flodl_tw.core.ends import ConnectionEnd, LinkEnd
from flodl_tw.core.errors import ViolationError, WireError
from flodl_tw.core.facts import Offer
from flodl_tw.core.ledger import Member, unspoken_version
from flodl_tw.core.messages import (
    Abort,
    Accept,
    Hello,
    JoinMessage,
    RankExited,
    Reject,
    WorldFormed,
    decode_join,
    encode_join,
)
from flodl_tw.core.refusals import Refusal, RefusalCode
from flodl_tw.core.reports import read_report
from flodl_tw.core.wire import MAGIC_BYTES, MAX_LATER_BYTES, ZERO_KEY, Frame, FrameKind, FrameReader
from flodl_tw.core.world import World
from flodl_tw.deadlines import DeadlineQueue
from flodl_tw.run import Run


class JoinFactory:
    """What all join connections share: the controller, and the deadline of a hello."""

    def __init__(self, front: FrontDoor, controller: Controller, port: int) -> None:
        self.controller = controller
        self.limits = front.limits
        self.port = port
        """The port that ranks are told to dial: the one that is listened on."""
        self.hellos: DeadlineQueue[JoinProtocol] = front.deadlines(front.limits.hello, JoinProtocol.hello_expired)

    def __call__(self, peeker: Peeker) -> JoinProtocol:
        """The route of the join magic."""
        return JoinProtocol(self, peeker)


class JoinProtocol:
    """One host's connection.  It belongs to the run that was current at its hello, and to no other."""

    __slots__ = ("__weakref__", "_ended", "_reader", "_shared", "member", "peeker", "run", "version")

    log = Logger()

    def __init__(self, shared: JoinFactory, peeker: Peeker) -> None:
        self.peeker = peeker
        self.run: Run = shared.controller.run
        self.member: Member | None = None
        self.version = 0
        self._shared = shared
        self._reader: FrameReader | None = None
        self._ended = False

    # The connection

    def makeConnection(self, transport: ITransport) -> None:
        """Bytes follow at once: the door calls with those that it has seen."""

    def dataReceived(self, data: bytes) -> None:
        if self._ended:
            return
        if self._reader is None:
            # The door has seen the four bytes of the magic, and passes them on with what follows.
            self._reader = FrameReader()
            data = data[MAGIC_BYTES:]
        reader = self._reader
        reader.feed(data)
        try:
            while not self._ended and (frame := reader.next_frame()) is not None:
                if self.member is None:
                    self._first(frame)
                else:
                    self._later(self.member, frame)
        except (WireError, ViolationError) as error:
            self._bad(str(error))
        if not self._ended and self.member is None and self not in self._shared.hellos:
            # Nearly every hello comes whole with its magic, and needs no deadline.
            self._shared.hellos.start(self)

    def readConnectionLost(self) -> None:
        """The peer has shut its side: a member has departed, and nobody else has anything to hear."""
        self._end(LinkEnd.CLOSED)
        self.peeker.close()

    def connectionLost(self, reason: Failure) -> None:
        silent = dead_peer.went_silent(self.peeker.transport)
        # Twisted says ConnectionDone for a peer's FIN, and ConnectionLost for everything rougher.
        self._end(LinkEnd.SILENT if silent else LinkEnd.RESET)

    def hello_expired(self) -> None:
        """The deadline of the hello has passed."""
        self._ended = True
        self.peeker.drop(ConnectionEnd.HELLO_DEADLINE, f"no whole hello within {self._shared.limits.hello} s")

    # ControlLink

    def send_world(self, world: World, member: Member, ranks: range) -> None:
        """Tell the host its world, with the controller at the address that it dialed."""
        dialed = classify(self.peeker.transport.getHost().host).shown
        envelope = world.envelope_hex(member, ranks, dialed, self._shared.port)
        relay_spec = world.relay_spec_hex(member, ranks, dialed, self._shared.port)
        self._send(self.run.session_salt, WorldFormed(envelope, relay_spec))

    def send_abort(self, reason: str) -> None:
        """Tell the host that it is over, and close."""
        self._ended = True
        self._send(self.run.session_salt, Abort(reason))
        self.peeker.close()

    # The first frame

    def _first(self, frame: Frame) -> None:
        controller = self._shared.controller
        self.run = controller.run
        self.version = frame.version
        key = self.run.session_salt if controller.credentialed else ZERO_KEY
        if not frame.verifies(key):
            self._unverified(*_unverified(frame, controller.credentialed))
            return
        refusal, hello = _read_hello(frame)
        if refusal is not None:
            self.run.refuse(refusal, self.peeker.endpoint)
            self._reject(key, refusal)
            return
        assert hello is not None
        outcome = self.run.hello(Offer(hello, frame.version, self.peeker.peer), self)
        if isinstance(outcome, Refusal):
            self._reject(key, outcome)
        else:
            self._accept(key, outcome)

    def _accept(self, key: bytes, member: Member) -> None:
        self.member = member
        self._identified()
        assert self._reader is not None
        self._reader.max_payload = MAX_LATER_BYTES
        sockets.tune_link(self.peeker.transport, self._shared.limits)
        salt_hex = None if self._shared.controller.credentialed else self.run.session_salt.hex()
        self._send(key, Accept(tuple(member.accepted_ranks), salt_hex, self.run.cap_remaining()))

    def _reject(self, key: bytes, refusal: Refusal) -> None:
        self._ended = True
        self._identified()
        self._send(key, Reject(refusal.reason))
        self.peeker.close()

    # Later frames

    def _later(self, member: Member, frame: Frame) -> None:
        if not frame.verifies(self.run.session_salt):
            raise WireError("a frame on its link does not verify")
        if frame.version != self.version:
            raise WireError(f"a frame of version {frame.version} on a link of version {self.version}")
        if frame.kind is FrameKind.REPORT:
            self.run.rank_reported(member, *read_report(frame.payload))
            return
        message = decode_join(frame.payload, frame.version) if frame.kind is FrameKind.JOIN else None
        if not isinstance(message, RankExited):
            raise ViolationError("a member may send RankExited and reports alone on its link")
        self.run.rank_exited(member, message.rank, message.code)

    # Ends

    def _unverified(self, end: ConnectionEnd, why: str) -> None:
        self._ended = True
        self.peeker.dropped(end, f"on the join channel: {why}", LogLevel.warn)
        self._identified()
        self.peeker.close()

    def _bad(self, why: str) -> None:
        if self.member is None:
            self._ended = True
            self.peeker.dropped(ConnectionEnd.BAD_FRAME, f"on the join channel: {why}")
            self._identified()
            self.peeker.close()
            return
        self.log.warn(
            "{host!r} at {who}: {why}; its link is closed", host=self.member.host, who=self.peeker.endpoint, why=why
        )
        self._end(LinkEnd.PROTOCOL_ERROR)
        self.peeker.close()

    def _end(self, end: LinkEnd) -> None:
        if not self._ended and self.member is None:
            self.peeker.left(ConnectionEnd.CUT_OFF_HELLO)
        self._ended = True
        self._identified()
        if self.member is not None:
            self.run.link_ended(self.member, end)
        self.member = None

    def _identified(self) -> None:
        self._shared.hellos.stop(self)
        self.peeker.identified()

    def _send(self, key: bytes, message: JoinMessage) -> None:
        self.peeker.transport.write(encode_join(key, self.version, message))


def _unverified(frame: Frame, credentialed: bool) -> tuple[ConnectionEnd, str]:
    """Why a whole frame's tag is wrong, as far as it can be told, and what to do."""
    if not credentialed:
        return (
            ConnectionEnd.WRONG_TOKEN,
            "its frame does not verify under the zero key: it may hold a token, and admission is open here",
        )
    if frame.verifies(ZERO_KEY):
        return ConnectionEnd.NO_TOKEN, "it has no token, and needs one here (--token-file; fdl: --token)"
    return ConnectionEnd.WRONG_TOKEN, "its frame verifies under no key of ours: most likely its token is another run's"


def _read_hello(frame: Frame) -> tuple[Refusal | None, Hello | None]:
    """The hello of an authenticated first frame, or the refusal that it gets."""
    unspoken = unspoken_version(frame.version)
    if unspoken is not None:
        return unspoken, None
    if frame.kind is not FrameKind.JOIN:
        return Refusal(RefusalCode.NOT_A_JOIN, f"a frame of kind {frame.kind.name.lower()} on the join channel"), None
    try:
        message = decode_join(frame.payload, frame.version)
    except WireError as error:
        return Refusal(RefusalCode.MALFORMED, f"the hello does not decode: {error}"), None
    if not isinstance(message, Hello):
        return Refusal(RefusalCode.NOT_A_HELLO, f"{type(message).__name__} came first, a join begins with Hello"), None
    return None, message
