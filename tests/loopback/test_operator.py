"""What an operator does to a real controller by HTTP: the answer leaves before the process does."""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path

from flodl_tw.core.messages import Abort
from flodl_tw.testing import make_hello
from flodl_tw.web.hello_json import hello_to_json
from tests.loopback.agents import Command
from tests.loopback.process import ProcessTestCase, body_of, head_of, until


def post(path: str, body: bytes, *headers: str) -> bytes:
    """A request as curl sends it."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


SILENT_RESOLVER = """
import socket, time
socket.getaddrinfo = lambda *asked, **options: time.sleep(600)
"""


class OperatorTests(ProcessTestCase):
    def command(self, *words: str, **environ: str) -> Command:
        command = Command(*words, environ=environ)
        self.addCleanup(command.close)
        return command

    def asks(self, command: Command) -> bool:
        """Whether the command has a connection."""
        links = Path(f"/proc/{command.pid}/fd").iterdir()
        with suppress(FileNotFoundError):
            return any(os.readlink(link).startswith("socket:") for link in links)
        return False

    def test_a_resolver_that_is_silent_holds_no_command_longer_than_it_says(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="flodl-tw-")
        self.addCleanup(folder.cleanup)
        Path(folder.name, "sitecustomize.py").write_text(SILENT_RESOLVER)
        commands = [
            self.command(*words, "ctl", PYTHONPATH=folder.name)
            for words in (("status",), ("wait",), ("abort",), ("join", "--check", "--nproc", "1"))
        ]
        for command in commands:
            # The look-up sleeps for 600 s.
            self.assertEqual(command.ended(90), 1)
            self.assertIn("nothing answers at ctl:29500: no whole answer within 10 s", command.err)

    def test_an_abort_is_answered_and_told_and_the_process_ends_with_1(self) -> None:
        controller = self.start("--min-rank-start", "9")
        host = self.joined(controller, "gpu-a", 2)
        answer = controller.http(post("/abort", b'{"reason":"wrong data set"}'))
        self.assertTrue(head_of(answer).startswith("HTTP/1.1 200 "), answer)
        self.assertEqual(json.loads(body_of(answer)), {"aborted": True, "joined_hosts": 1})
        self.assertEqual(host.rest(), [Abort("aborted by the operator: wrong data set")])
        self.assertEqual(controller.ended(), 1)
        self.assertIn("operator abort from 127.0.0.1: 2 ranks in (quorum 9)", controller.log)

    def test_wait_and_watch_end_as_the_run_does_though_the_controller_ends_with_it(self) -> None:
        for code, status, told in ((0, 0, "is done: every rank has exited with 0."), (3, 1, "exited with code 3.")):
            controller = self.start("--target-ranks", "1")
            address = f"http://127.0.0.1:{controller.port}/"
            waits = self.command("wait", address)
            until(partial(self.asks, waits), "its question")
            watches = self.command("status", "--watch", address)
            watches.printed(b"is waiting")
            host = self.joined(controller, "gpu-a", 1)
            host.exit_all(code)
            host.close()
            for command in (waits, watches):
                self.assertEqual(command.ended(), status, command.err)
                self.assertTrue(command.out.decode().rstrip().endswith(told), command.out)
            self.assertEqual(len(waits.out.splitlines()), 1)

    def test_a_check_as_large_as_a_hello_is_answered_to_a_client_that_waits_for_100(self) -> None:
        controller = self.start("--min-rank-start", "9")
        hello = make_hello("gpu-a", gpus=("x" * 250,) * 250)
        body = json.dumps(hello_to_json(hello, 4)).encode()
        self.assertGreater(len(body), 60_000)
        answer = controller.http(post("/check", body, "Expect: 100-continue"))
        first, _, rest = answer.partition(b"\r\n\r\n")
        self.assertEqual(first, b"HTTP/1.1 100 Continue")
        self.assertEqual(json.loads(body_of(rest)), {"admitted": True, "ranks": [0]})
        controller.state_is(joined_hosts=0)
