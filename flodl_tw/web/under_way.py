"""The answers under way: how many there may be, of how many bytes, and who is cut when there are more."""

from __future__ import annotations

from typing import Protocol

from flodl_tw.limits import MAX_ANSWER_BYTES, MAX_ANSWERS


class Client(Protocol):
    """A connection that is being sent an answer."""

    def give_up(self) -> None:
        """Close it, for the sake of others."""


class AnswersUnderWay:
    """Clients and the bodies that they are being sent, the oldest first; a body that many are sent counts once."""

    def __init__(self, most: int = MAX_ANSWERS, most_bytes: int = MAX_ANSWER_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._bodies: dict[Client, bytes] = {}

    def __len__(self) -> int:
        return len(self._bodies)

    def begin(self, client: Client, body: bytes) -> None:
        """A client is to be sent a body.  The newest stays, whatever it is sent."""
        self.end(client)
        self._bodies[client] = body
        while len(self._bodies) > 1 and (len(self._bodies) > self._most or self._bytes() > self._most_bytes):
            oldest = next(iter(self._bodies))
            self.end(oldest)
            oldest.give_up()

    def end(self, client: Client) -> None:
        """It has been sent its answer, or is gone."""
        self._bodies.pop(client, None)

    def _bytes(self) -> int:
        return sum({id(body): len(body) for body in self._bodies.values()}.values())
