"""The formed world: final ranks, and the envelope that each host is sent."""

from __future__ import annotations

from dataclasses import dataclass, field

from flodl_tw.core.ledger import Member
from flodl_tw.core.views import compact


@dataclass(frozen=True, slots=True)
class World:
    """The members of a world with their final ranks; frozen at the verdict.

    ``salt`` (16 bytes) keys what the ranks themselves say to the controller.
    """

    seats: tuple[tuple[Member, range], ...]
    salt: bytes
    world_size: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "world_size", sum(len(ranks) for _, ranks in self.seats))

    def envelope_hex(self, member: Member, ranks: range, dial_host: str, port: int) -> str:
        """What WorldFormed carries to one host: lower-case hex of UTF-8 JSON.

        ``dial_host`` and ``port`` are where this host's dial arrived, so that
        its ranks reach the controller the way that it did.
        """
        envelope = {
            "controller": {"host": dial_host, "port": port},
            "world_size": self.world_size,
            "num_workers": len(self.seats),
            "worker": {
                "host": member.host,
                "ranks": list(ranks),
                "local_devices": list(member.offer.hello.local_devices),
                "nccl_socket_ifname": "",
                "path": "",
            },
            "salt": self.salt.hex(),
        }
        return compact(envelope).encode("utf-8").hex()
