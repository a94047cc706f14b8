"""Real clients of the store: what torch's own server answers, ours does, call by call."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from flodl_tw.core.messages import WorldFormed
from tests.torch.cases import ENVIRON, LONG, Newest, Oldest

CALLS = frozenset(
    {
        *("add", "append", "check", "compare_set", "delete_key", "get", "has_extended_api", "multi_get", "multi_set"),
        *("num_keys", "set", "set_timeout", "wait"),
    }
)
"""The calls of every torch."""
NEWER_CALLS = frozenset({"barrier", "clone", "list_keys", "queue_len", "queue_pop", "queue_push"})


class StoreCalls:
    """Every call, in the order of the program, with two clients where one waits for another."""

    calls = CALLS

    def test_every_call_is_answered_as_by_torchs_own_store(self: Any) -> None:
        controller = self.start("--target-ranks", "1")
        member = self.joined(controller, "gpu-a")
        self.assertIsInstance(member.next(), WorldFormed)
        done = subprocess.run(
            self.program("calls.py", str(controller.port)),
            env={**os.environ, **ENVIRON},
            capture_output=True,
            text=True,
            timeout=LONG,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        theirs, ours = map(json.loads, done.stdout.splitlines())
        for (call, wanted), (same, answered) in zip(theirs["said"], ours["said"], strict=True):
            self.assertEqual((same, answered), (call, wanted))
        self.assertEqual(set(theirs["called"]), self.calls)
        self.assertEqual(ours, theirs)
        self.assertGreater(len(ours["said"]), 300)
        # A client that was closed cost its own connection, and a line of the log.
        for reason in ("is no number to add to", "over the limit of 8192", "over the limit of 8388608"):
            controller.said(reason)


class StoreCallsOfTheOldest(StoreCalls, Oldest):
    pass


class StoreCallsOfTheNewest(StoreCalls, Newest):
    calls = CALLS | NEWER_CALLS
