"""Every call of torch's store, on torch's own server and on the store at a port; prints the answers of each, as JSON.

Server and second client live in processes of their own: some calls of torch
keep the whole interpreter waiting.

usage: calls.py PORT
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import random
import re
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

LONG = timedelta(seconds=60)
"""For what is answered."""
SHORT = timedelta(milliseconds=100)
"""For what is not."""
MOST_SECS = 540
KEY_BYTES = 8 * 1024
VALUE_BYTES = 8 * 1024 * 1024


def connected(port: int, **how: Any) -> Any:
    """A client of the store."""
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=LONG, **how)


def short(value: object) -> str:
    """A text that is fit to be shown: a long one by its ends and its length."""
    text = repr(value)
    return text if len(text) < 200 else f"{text[:40]}...{text[-40:]} ({len(text)})"


def answer(call: Callable[[], Any]) -> str:
    """What a call gave, or what it raised; nothing in it tells of ports and times."""
    try:
        value = call()
    except Exception as error:
        first = str(error).partition("\n")[0].partition("Exception raised from")[0]
        return f"{type(error).__name__}: " + re.sub(r"\d+", "N", first).strip()
    # Keys are listed in no order; values come in that of their keys.
    return short(sorted(value) if isinstance(value, list) and value and isinstance(value[0], str) else value)


def server(pipe: Any) -> None:
    """Another process: torch's own store, until the pipe says that it is over."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


def second_client(pipe: Any) -> None:
    """The other process: does what it is told, a little later, so that the first client is waiting by then."""
    clients: dict[int, Any] = {}
    while (order := pipe.recv()) is not None:
        port, name, arguments = order
        # An answer is the same where it is not.
        time.sleep(0.05)
        if name == "worker":
            pipe.send(answer(partial(connected, port, world_size=2)).partition("(")[0])
            continue
        if port not in clients:
            clients[port] = connected(port, wait_for_workers=False)
        pipe.send(answer(partial(getattr(clients[port], name), *arguments)))


class Play:
    """All calls on one store."""

    def __init__(self, port: int, pipe: Any) -> None:
        self.port = port
        self.said: list[tuple[str, str]] = []
        self.called: set[str] = set()
        self._pipe = pipe
        self._store = connected(port, wait_for_workers=False)

    def call(self, name: str, *arguments: Any) -> None:
        """One call, unless this torch doesn't have it."""
        if not hasattr(self._store, name):
            return
        self.called.add(name)
        self.note(f"{name}{short(arguments)}", lambda: getattr(self._store, name)(*arguments))

    def note(self, what: str, call: Callable[[], Any]) -> None:
        """Keep what it was answered."""
        self.said.append((what, answer(call)))

    def both(self, name: str, arguments: tuple[Any, ...], other: str, others: tuple[Any, ...]) -> None:
        """A call here that may have to wait for the second client's."""
        if not (hasattr(self._store, name) and hasattr(self._store, other)):
            return
        self._pipe.send((self.port, other, others))
        self.call(name, *arguments)
        self.said.append((f"the other's {other}{short(others)}", self._pipe.recv()))

    def closed(self, name: str, *arguments: Any) -> None:
        """A call of a new client that the store closes for it, at once or when it asks for more."""

        def call() -> Any:
            client = connected(self.port, wait_for_workers=False)
            getattr(client, name)(*arguments)
            return client.check(["text"])

        self.said.append((f"{name}{short(arguments)} of a new client", answer(call).partition(":")[0]))

    def all(self) -> None:
        """Everything."""
        self.values()
        self.waits()
        self.queues()
        self.objects()
        self.at_random()
        self.limits()
        self.call("num_keys")
        self.call("list_keys")

    def values(self) -> None:
        """The calls that are answered at once."""
        for key, value in (("text", "one"), ("empty", ""), ("bytes", b"\xff\0\r\n"), ("", "no name"), ("/", "/")):
            self.call("set", key, value)
            self.call("get", key)
        for amount in (1, 41, -50, 0, (1 << 63) - 1, 100):
            self.call("add", "count", amount)
        self.call("get", "count")
        self.call("set", "blanks", " 12x")
        self.call("add", "blanks", 1)
        for expected, desired in (("", "first"), ("", "second"), ("first", "third"), ("none", "fourth")):
            self.call("compare_set", "swapped", expected, desired)
        self.call("compare_set", "absent", "something", "new")
        self.call("check", ["absent"])
        self.call("check", [])
        self.call("check", ["text", "empty"])
        self.call("check", ["text", "absent"])
        self.call("multi_set", ["m1", "m2", "m1"], ["1", "2", "3"])
        self.call("multi_set", ["m1"], ["1", "2"])
        self.call("multi_get", ["m2", "text", "m2", "empty"])
        self.call("multi_get", [])
        for more in ("a", "", "bc"):
            self.call("append", "grown", more)
            self.call("get", "grown")
        self.call("append", "text", " more")
        self.call("get", "text")
        self.call("delete_key", "text")
        self.call("delete_key", "text")
        self.call("check", ["text"])
        self.call("num_keys")
        self.call("list_keys")
        self.call("has_extended_api")

    def waits(self) -> None:
        """What is answered later, or never."""
        self.call("wait", ["empty", "bytes"])
        self.call("wait", [])
        self.call("wait", ["never"], SHORT)
        self.call("wait", ["empty", "never"], SHORT)
        self.call("get", "empty")
        self.both("get", ("late",), "set", ("late", "now"))
        self.both("wait", (["late", "later"],), "add", ("later", 1))
        self.both("wait", (["swapped late"], LONG), "compare_set", ("swapped late", "", "x"))
        self.both("multi_get", (["late", "several"],), "multi_set", (["some", "several"], ["1", "2"]))
        self.both("get", ("grown late",), "append", ("grown late", "x"))
        self.both("barrier", ("all here", 2), "barrier", ("all here", 2))
        self.call("barrier", "alone", 1)
        self.call("barrier", "not all here", 2, SHORT)
        self._pipe.send((self.port, "worker", ()))
        self.note("a world of two clients", lambda: connected(self.port, world_size=2).check(["text"]))
        self.said.append(("the other of the two", self._pipe.recv()))
        self.call("set_timeout", SHORT)
        self.call("get", "never")
        self.call("set_timeout", LONG)
        self.call("num_keys")

    def queues(self) -> None:
        """The calls for queues; empty ones are forgotten."""
        self.call("queue_len", "q")
        self.call("queue_pop", "q", False)
        for item in ("1", "", "2"):
            self.call("queue_push", "q", item)
        self.call("queue_len", "q")
        self.call("check", ["q"])
        self.call("num_keys")
        for _ in range(4):
            self.call("queue_pop", "q", False)
        self.call("check", ["q"])
        self.both("queue_pop", ("late q",), "queue_push", ("late q", "item"))
        self.both("wait", (["waited q"],), "queue_push", ("waited q", "item"))
        self.call("queue_len", "waited q")

    def objects(self) -> None:
        """What torch makes of a store: views with a prefix, and a second connection."""
        prefixed = dist.PrefixStore("outer", dist.PrefixStore("inner", self._store))
        self.note("a prefixed set", lambda: prefixed.set("key", "value"))
        self.note("a prefixed add", lambda: prefixed.add("sum", 3))
        self.note("a prefixed wait", lambda: prefixed.wait(["key"], LONG))
        self.call("get", "inner/outer/key")
        if hasattr(self._store, "clone"):
            self.called.add("clone")
            self.note("the clone's get", lambda: self._store.clone().get("late"))

    def at_random(self) -> None:
        """A few hundred calls on a few keys, the same on each store."""
        pick = random.Random(7)
        keys, values = [f"k{number}" for number in range(5)], ["", "x", "yy", "z" * 5000]
        for _ in range(400):
            key, value, other = pick.choice(keys), pick.choice(values), pick.choice(values)
            name, *arguments = pick.choice(
                [
                    ("set", key, value),
                    ("add", f"n{key}", pick.randrange(-9, 9)),
                    ("compare_set", key, value, other),
                    ("append", key, value),
                    ("check", [key, pick.choice(keys)]),
                    ("delete_key", key),
                    ("multi_set", [key, pick.choice(keys)], [value, other]),
                    ("queue_push", f"q{key}", value),
                    ("queue_len", f"q{key}"),
                    ("queue_pop", f"q{key}", False),
                    ("num_keys",),
                    ("list_keys",),
                ]
            )
            self.call(name, *arguments)
        for key in keys:
            self.both("get", (key,), "set", (key, "z")) if pick.random() < 0.5 else self.call("check", [key])

    def limits(self) -> None:
        """The longest that torch's own store takes, and one byte more."""
        self.call("set", "k" * (KEY_BYTES - 1), "long key")
        self.call("get", "k" * (KEY_BYTES - 1))
        self.call("set", "long", "v" * VALUE_BYTES)
        self.call("get", "long")
        self.call("delete_key", "long")
        self.closed("add", "empty", 1)
        self.closed("add", "bytes", 1)
        self.closed("set", "k" * KEY_BYTES, "too long a key")
        self.closed("set", "too long", "v" * (VALUE_BYTES + 1))
        self.call("check", ["too long"])


def forked(serve: Callable[[Any], None]) -> Any:
    """Our end of a pipe to a new process, which has imported torch already and has no threads yet."""
    ours, theirs = multiprocessing.Pipe()
    multiprocessing.get_context("fork").Process(target=serve, args=(theirs,), daemon=True).start()
    return ours


def main() -> None:
    faulthandler.dump_traceback_later(MOST_SECS, exit=True)
    torchs, other = forked(server), forked(second_client)
    for port in (torchs.recv(), int(sys.argv[1])):
        play = Play(port, other)
        play.all()
        print(json.dumps({"called": sorted(play.called), "said": play.said}), flush=True)
    for pipe in (torchs, other):
        pipe.send(None)


if __name__ == "__main__":
    main()
