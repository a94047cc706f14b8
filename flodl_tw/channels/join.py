"""The join channel: a hello and its answer, then the host's control link.

Thin on purpose: frames become calls on a run, and what the run says goes back
as frames in the peer's own version.
"""

from __future__ import annotations

from twisted.logger import Logger, LogLevel

from flodl_tw import sockets
from flodl_tw.channels.dead_peer import send, went_silent
from flodl_tw.channels.framed import FramedProtocol
from flodl_tw.channels.front_door import FrontDoor
from flodl_tw.channels.peeker import Peeker
from flodl_tw.controller import Controller
from flodl_tw.core.ends import ConnectionEnd, LinkEnd
from flodl_tw.core.errors import ViolationError, WireError
from flodl_tw.core.facts import Offer
from flodl_tw.core.ledger import Member, unspoken_version
from flodl_tw.core.log_text import quoted
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
from flodl_tw.core.wire import ZERO_KEY, Frame, FrameKind
from flodl_tw.core.world import World
from flodl_tw.deadlines import DeadlineQueue
from flodl_tw.run import Run

_log = Logger()


class JoinFactory:
    """What all join connections share: the controller, and the deadline of a hello."""

    def __init__(self, front: FrontDoor, controller: Controller) -> None:
        self.controller = controller
        self.limits = front.limits
        self.hellos: DeadlineQueue[FramedProtocol] = front.deadlines(front.limits.hello, FramedProtocol.expired)

    def buildProtocol(self, peeker: Peeker) -> JoinProtocol:
        """A host's connection."""
        return JoinProtocol(self, peeker)


class JoinProtocol(FramedProtocol):
    """One host's connection.  It belongs to the run that was current at its hello, and to no other."""

    __slots__ = ("_salt", "_shared", "member", "run", "version")

    def __init__(self, shared: JoinFactory, peeker: Peeker) -> None:
        super().__init__(peeker, shared.hellos, "hello")
        self.run: Run = shared.controller.run
        self.member: Member | None = None
        self.version = 0
        self._shared = shared
        self._salt = b""

    # FramedProtocol

    def frame_received(self, frame: Frame) -> None:
        if self.member is None:
            self._first(frame)
        else:
            self._later(self.member, frame)

    def broke(self, why: str) -> None:
        if self.member is None:
            self.peeker.dropped(ConnectionEnd.BAD_FRAME, f"on the join channel: {why}")
        else:
            _log.warn(
                "{host!r} at {who}: {why}; its link is closed", host=self.member.host, who=self.peeker.endpoint, why=why
            )
            self._link_ended(LinkEnd.PROTOCOL_ERROR)
        self.finish()

    def left(self, *, lost: bool) -> None:
        # The end of a peer's sending side comes first where its connection ends in order.
        end = LinkEnd.RESET if lost else LinkEnd.CLOSED
        self._link_ended(LinkEnd.SILENT if lost and went_silent(self.peeker.transport) else end)

    # ControlLink

    def send_world(self, world: World, member: Member, ranks: range) -> None:
        """Tell the host its world, with the controller at the address that it dialed."""
        dialed = self.peeker.dialed
        envelope = world.envelope_hex(member, ranks, *dialed)
        self._send(self._salt, WorldFormed(envelope, world.relay_spec_hex(member, ranks, *dialed)))

    def send_abort(self, reason: str) -> None:
        """Tell the host that it is over, and close."""
        self._send(self._salt, Abort(reason))
        self.finish()

    def read_end(self) -> None:
        """The peer's end, where it has come and was not read yet, is read now."""
        if not self.ended and sockets.has_hung_up(self.peeker.transport):
            self.readConnectionLost()

    # The first frame

    def _first(self, frame: Frame) -> None:
        controller = self._shared.controller
        self.run = controller.run
        self.version = frame.version
        self._salt = controller.salt
        key = self._salt if controller.credentialed else ZERO_KEY
        if not frame.verifies(key):
            end, what, why = _unverified(frame, controller.credentialed)
            self.run.unheard(what)
            self.peeker.dropped(end, f"on the join channel: {why}", warn=True)
            self.finish()
            return
        refusal, hello = _read_hello(frame)
        if refusal is not None:
            self._reject(key, refusal, self.peeker.peer, self.peeker.endpoint)
            return
        assert hello is not None
        outcome = self.run.hello(Offer(hello, frame.version, self.peeker.address.shown, self.peeker.dialed[0]), self)
        if isinstance(outcome, Refusal):
            host = f"host {quoted(hello.host)} at {self.peeker.peer}"
            self._reject(key, outcome, host, host)
        else:
            self._accept(key, outcome)

    def _accept(self, key: bytes, member: Member) -> None:
        self.member = member
        self.identified()
        sockets.tune_link(self.peeker.transport, self._shared.limits)
        salt_hex = None if self._shared.controller.credentialed else self._salt.hex()
        self._send(key, Accept(tuple(member.accepted_ranks), salt_hex, self.run.window.cap_remaining()))

    def _reject(self, key: bytes, refusal: Refusal, counted_as: str, who: str) -> None:
        text = f"refused {who}: {refusal.reason}"
        self.peeker.door.lines.line(counted_as, f"refused, {refusal.code.value}", text, LogLevel.warn)
        self.identified()
        self._send(key, Reject(refusal.reason))
        self.finish()

    # Later frames

    def _later(self, member: Member, frame: Frame) -> None:
        if not frame.verifies(self._salt):
            raise WireError("a frame on its link does not verify")
        if frame.version != self.version:
            raise WireError(f"a frame of version {frame.version} on a link of version {self.version}")
        if frame.kind is FrameKind.HEARTBEAT:
            return
        if frame.kind is FrameKind.REPORT:
            self.run.rank_reported(member, *read_report(frame.payload))
            return
        message = decode_join(frame.payload, frame.version) if frame.kind is FrameKind.JOIN else None
        if not isinstance(message, RankExited):
            raise ViolationError("a member may send RankExited, reports and heartbeats alone on its link")
        self.run.rank_exited(member, message.rank, message.code)

    def _link_ended(self, end: LinkEnd) -> None:
        member, self.member = self.member, None
        if member is not None:
            self.run.link_ended(member, end)

    def _send(self, key: bytes, message: JoinMessage) -> None:
        send(self.peeker.transport, encode_join(key, self.version, message))


def _unverified(frame: Frame, credentialed: bool) -> tuple[ConnectionEnd, str, str]:
    """Why a whole frame's tag is wrong, as far as it can be told: what it had, in a few words, and what to do."""
    if not credentialed:
        return (
            ConnectionEnd.WRONG_TOKEN,
            "a token where admission is open",
            "its frame does not verify under the zero key: it may hold a token, and admission is open here",
        )
    if frame.verifies(ZERO_KEY):
        return ConnectionEnd.NO_TOKEN, "no token", "it has no token, and needs one here (--token-file; fdl: --token)"
    return (
        ConnectionEnd.WRONG_TOKEN,
        "a wrong token",
        "its frame verifies under no key of ours: most likely its token is another run's",
    )


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
