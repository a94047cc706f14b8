"""The formed world: final ranks, and what each host is sent for its ranks and its relay."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from flodl_tw.core.addresses import classify
from flodl_tw.core.fields import compact
from flodl_tw.core.ledger import Member
from flodl_tw.core.log_text import shown
from flodl_tw.core.tokens import without_tokens

FRAME_CEILING: Final = 1 << 30
"""Bytes of the largest frame that a relay passes on, unless the operator says otherwise."""


MAX_ENVIRON_BYTES: Final = 16 * 1024
"""What the operator's variables for a host's ranks may have in all; the envelope goes into one of them itself."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def wrong_environ(environ: Mapping[str, str]) -> str | None:
    """What is wrong with an operator's variables for ranks, in words; None where nothing is."""
    for name, text in environ.items():
        if not _VARIABLE.fullmatch(name):
            return f"{shown(without_tokens(name))} is no name of a variable: letters, digits and _"
        if "\0" in text:
            return f"{shown(name)} has a NUL in its value"
    size = sum(len(name) + len(text.encode()) for name, text in environ.items())
    return f"it has {size} bytes, the limit is {MAX_ENVIRON_BYTES}" if size > MAX_ENVIRON_BYTES else None


@dataclass(frozen=True, slots=True)
class WorkerFields:
    """What the operator says of one host; empty for a walk-in.

    ``gpu_ram_share`` is in (0, 1].  Fields that are None are left out.
    ``environ`` is for the ranks of our own agents.
    """

    nccl_socket_ifname: str = ""
    path: str = ""
    arch: str | None = None
    data_path: str | None = None
    gpu_ram_share: float | None = None
    environ: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        """The keys of the envelope's ``worker`` that the operator gives."""
        # asdict() copies each value, which takes a tenth of a join.
        names = [name for name in self.__slots__ if name != "environ"]
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@dataclass(frozen=True, slots=True)
class RelaySettings:
    """What a host's relay is told where a coordinator runs behind the control channel."""

    data_channel: bool = False
    frame_ceiling: int = FRAME_CEILING


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """What the operator adds to what a world's hosts are sent: by host name, and for everybody else."""

    roster: Mapping[str, WorkerFields] = field(default_factory=dict)
    walk_in: WorkerFields = field(default_factory=WorkerFields)
    relay: RelaySettings | None = None


@dataclass(frozen=True, slots=True)
class World:
    """The members of a world with their final ranks; frozen at the verdict.

    ``salt`` (16 bytes) keys what the ranks themselves say to the controller.
    ``run_id`` names the world to its ranks, and is no secret; ``store`` says
    whether torch's store is served on our port.
    """

    assignments: tuple[tuple[Member, range], ...]
    salt: bytes = field(repr=False)
    launch: LaunchSettings = field(default_factory=LaunchSettings)
    run_id: str = ""
    store: bool = False
    world_size: int = field(init=False)
    rank0_address: str = field(init=False)
    """Where the host of rank 0 is, as the others can reach it: loopback only where every host dialed that."""
    _group_ranks: Mapping[Member, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "world_size", sum(len(ranks) for _, ranks in self.assignments))
        object.__setattr__(self, "_group_ranks", {member: index for index, (member, _) in enumerate(self.assignments)})

        object.__setattr__(self, "rank0_address", self._rank0_address())

    def _rank0_address(self) -> str:
        offers = [member.offer for member, _ in self.assignments]
        if offers and classify(offers[0].address).loopback:
            # It is on our own machine, which the others have dialed.
            away = (offer.dialed for offer in offers if not classify(offer.address).loopback)
            return next(away, offers[0].address)
        return offers[0].address if offers else ""

    def envelope_hex(self, member: Member, ranks: range, dial_host: str, port: int) -> str:
        """What WorldFormed carries to one host: lower-case hex of UTF-8 JSON.

        ``dial_host`` and ``port`` are where this host's dial arrived, so that
        its ranks reach the controller the way that it did.
        """
        fields = self.launch.roster.get(member.host, self.launch.walk_in)
        envelope = {
            "controller": {"host": dial_host, "port": port},
            "world_size": self.world_size,
            "num_workers": len(self.assignments),
            "worker": {
                "host": member.host,
                "ranks": list(ranks),
                "local_devices": list(member.offer.hello.local_devices),
                **fields.as_json(),
            },
            "salt": self.salt.hex(),
            # An object of ours, for our own agents; others ignore what they do not know.
            "flodl_tw": {
                "group_rank": self._group_ranks[member],
                "group_world_size": len(self.assignments),
                "run_id": self.run_id,
                "store": self.store,
                "reports": True,
                "heartbeats": True,
                "rank0_address": self.rank0_address,
                "environ": dict(fields.environ),
            },
        }
        return _hex(envelope)

    def relay_spec_hex(self, member: Member, ranks: range, dial_host: str, port: int) -> str | None:
        """The same for the host's relay; None where there is no coordinator behind the control channel."""
        relay = self.launch.relay
        if relay is None:
            return None
        return _hex(
            {
                "host": member.host,
                "controller_host": dial_host,
                "controller_port": port,
                "ranks": list(ranks),
                "salt_hex": self.salt.hex(),
                "world_size": self.world_size,
                "data_channel": relay.data_channel,
                "frame_ceiling_bytes": relay.frame_ceiling,
            }
        )


def _hex(value: dict[str, object]) -> str:
    return compact(value).encode("utf-8").hex()
