"""The membership ledger: who is in, with which ranks, and why not.

To change a rule of the membership, change one function of ``CHECKS`` and its
row in ``tests/core/test_ledger.py``.  The checks only look; ``enter`` commits
once all have passed, so a refused offer leaves no trace.  There is no clock and
no network in it: the caller says when and from where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar, cast

from flodl_tw.core.facts import DATASET_FACT, FACTS, MODEL_FACT, VERSION_FACT, Fact, Offer, fact_text
from flodl_tw.core.log_text import MAX_TEXT_BYTES, quoted, too_long
from flodl_tw.core.messages import VERSIONS
from flodl_tw.core.phrases import counted, out_of
from flodl_tw.core.refusals import Refusal, RefusalCode

T = TypeVar("T")
MAX_DEVICES: Final = 256
MAX_LABELS: Final = 256


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """A host that is in.

    ``accepted_from`` is the first rank that its Accept named; its ranks in the
    world are the ledger's to say (``Ledger.roster``).  ``joined_at`` is in
    seconds since the window opened.
    """

    offer: Offer
    accepted_from: int
    joined_at: float

    @property
    def host(self) -> str:
        return self.offer.hello.host

    @property
    def size(self) -> int:
        return len(self.offer.hello.local_devices)

    @property
    def accepted_ranks(self) -> range:
        """The ranks that its Accept named, and that it will name in turn."""
        return range(self.accepted_from, self.accepted_from + self.size)


@dataclass(slots=True)
class Expectation:
    """The value of one fact that members hold, the member shown as the one who set it, and how many stated it.

    The setter is None where the operator set it.
    """

    value: object
    setter: Member | None
    holders: int = 0


class Ledger:
    """The members of one join window, in admission order.

    ``nccl`` says whether the data plane is NCCL or RCCL; only then is anything
    expected of the facts that are theirs.  ``dataset_sig`` and ``model_sig`` (32 bytes) are what the
    operator expects; where None, the first member that states one sets it.
    ``most_ranks`` is how many ranks the members may have together; None sets no limit.
    """

    def __init__(
        self,
        *,
        nccl: bool = True,
        dataset_sig: bytes | None = None,
        model_sig: bytes | None = None,
        most_ranks: int | None = None,
    ) -> None:
        self.joined_ranks = 0
        self.most_ranks = most_ranks
        self.departures = 0
        """Goes up at each departure, after which the ranks of others have moved."""
        self._members: dict[str, Member] = {}
        self._expected: dict[str, Expectation] = {}
        self._facts = tuple(fact for fact in FACTS if nccl or not fact.nccl_only)
        for fact, value in ((DATASET_FACT, dataset_sig), (MODEL_FACT, model_sig)):
            if value is not None:
                self._expected[fact.name] = Expectation(value, None)

    @property
    def joined_hosts(self) -> int:
        return len(self._members)

    def member(self, host: str) -> Member | None:
        return self._members.get(host)

    def roster(self) -> Iterator[tuple[Member, range]]:
        """The members in admission order, each with its ranks: contiguous from 0, one a device."""
        first = 0
        for member in self._members.values():
            yield member, range(first, first + member.size)
            first += member.size

    def refusal(self, offer: Offer, now: float) -> Refusal | None:
        """Why the offer would be refused, or None.  ``now``: seconds since the window opened.

        Changes nothing.  The cost does not grow with the membership.
        """
        for code, check in CHECKS:
            text = check(self, offer, now)
            if text is not None:
                return Refusal(code, text)
        return None

    def next_ranks(self, offer: Offer) -> range:
        """The ranks that an Accept of the offer would name."""
        return range(self.joined_ranks, self.joined_ranks + len(offer.hello.local_devices))

    def enter(self, offer: Offer, now: float) -> Member:
        """Commit an offer that ``refusal`` has passed."""
        member = Member(offer, self.joined_ranks, now)
        self._members[member.host] = member
        self.joined_ranks += member.size
        for fact in self._facts:
            value = fact.stated(offer)
            if value is not None:
                expectation = self._expected.get(fact.name)
                if expectation is None:
                    expectation = self._expected[fact.name] = Expectation(value, member)
                expectation.holders += 1
        return member

    def depart(self, member: Member) -> None:
        """The member left: its name and ranks are free, and what only it stated is forgotten."""
        if self._members.get(member.host) is not member:
            raise ValueError(f"{member.host!r} is not a member")
        del self._members[member.host]
        self.joined_ranks -= member.size
        self.departures += 1
        for fact in self._facts:
            if fact.stated(member.offer) is not None:
                expectation = self._expected[fact.name]
                expectation.holders -= 1
                if not expectation.holders and expectation.setter is not None:
                    del self._expected[fact.name]

    def expected(self, fact: Fact[T]) -> T | None:
        """The value that the next offer has to agree with, or None while nobody stated one."""
        expectation = self._expected.get(fact.name)
        return None if expectation is None else cast(T, expectation.value)

    def setter(self, fact: Fact[object]) -> Member | None:
        """The member that set what is expected; None where it was the operator, or nobody.

        Where the first one left, the eldest of those that stated the same takes its place.
        """
        expectation = self._expected.get(fact.name)
        if expectation is None or expectation.setter is None:
            return None
        if self._members.get(expectation.setter.host) is not expectation.setter:
            expectation.setter = next(
                member for member in self._members.values() if fact.stated(member.offer) is not None
            )
        return expectation.setter


def unspoken_version(version: int) -> Refusal | None:
    """The refusal of a protocol version that this project does not speak: it comes before all that a hello says."""
    if version in VERSIONS:
        return None
    spoken = " and ".join(map(str, VERSIONS))
    return Refusal(
        RefusalCode.UNSPOKEN_VERSION,
        f"the frame has protocol version {version}, this controller speaks {spoken}: "
        "use a flodl release that speaks one of them",
    )


Check = Callable[[Ledger, Offer, float], str | None]
"""Gives what is wrong with an offer, and the way out; None where nothing is.  The float is that of ``refusal``."""


def check_host(ledger: Ledger, offer: Offer, now: float) -> str | None:
    """The name is one that a log line, a page and a person can hold."""
    host = offer.hello.host
    if not host.strip():
        return f"the host name {quoted(host)} is blank: give the host a name"
    if too_long(host):
        size = len(host.encode("utf-8"))
        return f"the host name {quoted(host)} has {size} bytes, the limit is {MAX_TEXT_BYTES}: shorten it"
    if not host.isprintable():
        # Control characters, and those that are invisible or turn a line of text around.
        return f"the host name {quoted(host)} has characters that do not print: leave them out"
    return None


def check_labels(ledger: Ledger, offer: Offer, now: float) -> str | None:
    """The labels are few and short enough to keep and show."""
    hello = offer.hello
    if len(hello.gpus) > MAX_LABELS:
        return f"{quoted(hello.host)} sent {len(hello.gpus)} GPU labels, the limit is {MAX_LABELS}: send fewer"
    for label in (*hello.gpus, hello.libtorch, hello.run_id or ""):
        if too_long(label):
            size = len(label.encode("utf-8"))
            return (
                f"{quoted(hello.host)} sent the label {quoted(label)} of {size} bytes, "
                f"the limit is {MAX_TEXT_BYTES}: shorten it"
            )
    return None


def check_some_device(ledger: Ledger, offer: Offer, now: float) -> str | None:
    """A host without a device has no rank."""
    if offer.hello.local_devices:
        return None
    return f"{quoted(offer.hello.host)} offers no device: make at least one visible to the agent"


def check_device_count(ledger: Ledger, offer: Offer, now: float) -> str | None:
    """One hello cannot inflate the world."""
    count = len(offer.hello.local_devices)
    if count <= MAX_DEVICES:
        return None
    return f"{quoted(offer.hello.host)} offers {count} devices, the limit a host is {MAX_DEVICES}: offer fewer"


def check_repeated_device(ledger: Ledger, offer: Offer, now: float) -> str | None:
    """Each rank has a device to itself."""
    devices = offer.hello.local_devices
    if len(set(devices)) == len(devices):
        return None
    repeated = next(device for index, device in enumerate(devices) if device in devices[:index])
    host = quoted(offer.hello.host)
    return f"{host} offers device {repeated} twice, and each rank needs one of its own: name it once"


def check_duplicate(ledger: Ledger, offer: Offer, now: float) -> str | None:
    """One host a name, compared as sent."""
    holder = ledger.member(offer.hello.host)
    if holder is None:
        return None
    age = max(0, int(now - holder.joined_at))
    return (
        f"{quoted(holder.host)} is in already, from {holder.offer.address}, joined {age} s ago: if that is a stale "
        "worker of an earlier launch, end it and its name is free; if two hosts have one name, give one another "
        "(--host)"
    )


def agreement(fact: Fact[object]) -> tuple[RefusalCode, Check]:
    """The check that an offer states what the members stated of ``fact``, or nothing."""

    def check(ledger: Ledger, offer: Offer, now: float) -> str | None:
        offered, expected = fact.stated(offer), ledger.expected(fact)
        if offered is None or expected is None or offered == expected:
            return None
        setter = ledger.setter(fact)
        source, blame = "the operator", ""
        if setter is not None:
            source = f"{quoted(setter.host)} (the first to state it)"
            blame = f"; if {quoted(setter.host)} is the one that is wrong, end its agent and dial again"
        return (
            f"{quoted(offer.hello.host)} has {fact.name} {fact_text(offered)}, this run has "
            f"{fact_text(expected)}, set by {source}: {fact.advice}{blame}"
        )

    return fact.code, check


def check_room(ledger: Ledger, offer: Offer, now: float) -> str | None:
    """A world whose quorum is its target has exactly so many ranks."""
    most, count = ledger.most_ranks, len(offer.hello.local_devices)
    if most is None or ledger.joined_ranks + count <= most:
        return None
    free = most - ledger.joined_ranks
    fits = f"offer {free} or fewer (--devices or --nproc)" if free else "wait until a host leaves"
    return (
        f"{quoted(offer.hello.host)} offers {counted(count, 'device')}, and {out_of(free, most, 'rank')} "
        f"{'is' if free == 1 else 'are'} free (--target-ranks, which is the quorum, too): {fits}"
    )


CHECKS: Final[tuple[tuple[RefusalCode, Check], ...]] = (
    (RefusalCode.BAD_HOST, check_host),
    (RefusalCode.BAD_LABEL, check_labels),
    (RefusalCode.NO_DEVICES, check_some_device),
    (RefusalCode.TOO_MANY_DEVICES, check_device_count),
    (RefusalCode.REPEATED_DEVICE, check_repeated_device),
    agreement(VERSION_FACT),
    (RefusalCode.DUPLICATE_HOST, check_duplicate),
    *(agreement(fact) for fact in FACTS if fact is not VERSION_FACT),
    (RefusalCode.TOO_MANY_RANKS, check_room),
)
"""The admission order: the first that fails is the reason.  What a host can't mend in itself comes last."""
