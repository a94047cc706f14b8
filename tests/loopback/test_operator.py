"""What an operator does to a real controller by HTTP: the answer leaves before the process does."""

from __future__ import annotations

import json

from flodl_tw.core.messages import Abort
from flodl_tw.testing import make_hello
from flodl_tw.web.hello_json import hello_to_json
from tests.loopback.process import ProcessTestCase, body_of, head_of


def post(path: str, body: bytes, *headers: str) -> bytes:
    """A request as curl sends it."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


class OperatorTests(ProcessTestCase):
    def test_an_abort_is_answered_and_told_and_the_process_ends_with_1(self) -> None:
        controller = self.start("--min-rank-start", "9")
        host = self.joined(controller, "gpu-a", 2)
        answer = controller.http(post("/abort", b'{"reason":"wrong data set"}'))
        self.assertTrue(head_of(answer).startswith("HTTP/1.1 200 "), answer)
        self.assertEqual(json.loads(body_of(answer)), {"aborted": True, "joined_hosts": 1})
        self.assertEqual(host.rest(), [Abort("aborted by the operator: wrong data set")])
        self.assertEqual(controller.ended(), 1)
        self.assertIn("operator abort from 127.0.0.1: 2 ranks in (quorum 9)", controller.log)

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
