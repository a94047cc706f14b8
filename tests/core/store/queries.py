"""Queries of torch's store as bytes, its recorded conversations, and what a connection answered as bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flodl_tw.core.store.session import StoreEffects, StoreSession
from flodl_tw.core.store.wire import Opcode

HELLO = bytes.fromhex("00cef7853c")
CAPTURES = sorted((Path(__file__).parents[2] / "vectors" / "tcpstore").glob("*.txt"))


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def i64(value: int) -> bytes:
    return struct.pack("<q", value)


def q(opcode: Opcode, *fields: bytes | int) -> bytes:
    """A query of a fixed shape."""
    return bytes((opcode,)) + b"".join(i64(each) if isinstance(each, int) else text(each) for each in fields)


def many(opcode: Opcode, *fields: bytes, count: int | None = None) -> bytes:
    """A query of counted fields; MULTI_SET counts pairs."""
    if count is None:
        count = len(fields) // 2 if opcode == Opcode.MULTI_SET else len(fields)
    return bytes((opcode,)) + struct.pack("<Q", count) + b"".join(map(text, fields))


def sent(outcome: StoreEffects) -> bytes:
    return b"".join(outcome.replies)


def answered(client: StoreSession, asked: bytes) -> bytes:
    """All that a client is answered, though it be in several parts."""
    outcome = client.feed(asked)
    answer = sent(outcome)
    while outcome.more:
        outcome = client.feed(b"")
        answer += sent(outcome)
    return answer


@dataclass
class Call:
    """One call of a real client: its name, and what went up and down in turns."""

    name: str
    turns: list[tuple[bytes, bytes]]


def calls(path: Path) -> Iterator[Call]:
    call: Call | None = None
    for line in path.read_text("utf-8").splitlines():
        if line.startswith("== "):
            if call is not None:
                yield call
            call = Call(line[3:], [])
        elif call is not None and line.startswith(("   > ", "   < ")):
            brought = bytes.fromhex(line[5:].partition("   |")[0])
            if line[3] == ">":
                call.turns.append((brought, b""))
            else:
                call.turns[-1] = (call.turns[-1][0], call.turns[-1][1] + brought)
    if call is not None:
        yield call


def conversations(path: Path) -> Iterator[tuple[bytes, list[Call]]]:
    """A recorded file by connection: all that went up on each, and its calls."""
    up, part = b"", list[Call]()
    for call in calls(path):
        if part and call.turns and call.turns[0][0].startswith(HELLO):
            yield up, part
            up, part = b"", list[Call]()
        up += b"".join(turn[0] for turn in call.turns)
        part.append(call)
    yield up, part


def same_answer(call: Call, answer: bytes, recorded: bytes) -> bool:
    """Whether an answer is the recorded one; torch lists keys in the order of its hash table."""
    if call.name.startswith("list_keys"):
        return listed(answer) == listed(recorded)
    return answer == recorded


def listed(answer: bytes) -> list[bytes]:
    """The keys of a LIST_KEYS answer, sorted."""
    count, at, keys = struct.unpack_from("<q", answer)[0], 8, []
    for _ in range(count):
        end = at + 8 + struct.unpack_from("<Q", answer, at)[0]
        keys.append(answer[at + 8 : end])
        at = end
    assert at == len(answer)
    return sorted(keys)
