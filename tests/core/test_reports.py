"""What a rank said of its death: every shape of error file, and a report that fits its frame whatever it was."""

from __future__ import annotations

import json
import traceback
import unittest
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from flodl_tw.core.errors import WireError
from flodl_tw.core.reports import (
    MOST_CHARS,
    RankError,
    last_line,
    last_words,
    read_error_file,
    read_report,
    report_payload,
    tidy,
)
from flodl_tw.core.wire import MAX_LATER_BYTES

STACK = """Traceback (most recent call last):
  File "/opt/torch/elastic/multiprocessing/errors/__init__.py", line 357, in wrapper
    return f(*args, **kwargs)
           ^^^^^^^^^^^^^^^^^^
  File "train.py", line 12, in main
    raise ValueError("no such shard: 7")
ValueError: no such shard: 7
"""
WHERE = 'train.py:12 in main: raise ValueError("no such shard: 7")'
BOOM = RankError("ValueError", "boom", "")


def recorded(error: BaseException) -> bytes:
    """The error file that torch's ``@record`` writes."""
    stack = "".join(traceback.format_exception(error))
    extra = {"py_callstack": stack, "timestamp": "1750000000"}
    return json.dumps({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}).encode()


def nested(message: Any, extra: Any = None) -> bytes:
    return json.dumps({"message": {"message": message, "extraInfo": extra}}).encode()


class TestLastWords(unittest.TestCase):
    """What the end of standard error says of a death."""

    def said(self, text: str) -> str:
        told = last_words(text.encode())
        self.assertIsNotNone(told)
        return "" if told is None else told.text

    def test_the_exception_of_the_last_traceback_wins_over_what_was_said_after_it(self) -> None:
        right = f"ValueError: no such shard: 7, at {WHERE}"
        self.assertEqual(self.said(STACK), right)
        self.assertEqual(
            self.said(f"Traceback (most recent call last):\nOSError: first\n{STACK}[W] not destroyed\n"), right
        )

    def test_the_prefixes_of_torch_and_the_colours_of_a_terminal_are_none_of_it(self) -> None:
        marked = "".join(f"[rank3]: {line}\n" for line in STACK.splitlines())
        self.assertEqual(self.said(marked), f"ValueError: no such shard: 7, at {WHERE}")
        self.assertEqual(self.said("\x1b[1;31mboom\x1b[0m\n"), "its last line: boom")

    def test_without_one_it_is_the_last_line(self) -> None:
        self.assertEqual(self.said("first\nlast \x07\n\n  \n"), "its last line: last ?")
        self.assertEqual(self.said("10%\r20%\r"), "its last line: 20%")
        self.assertEqual(self.said("Traceback (most recent call last):\n  cut"), "its last line: cut")

    def test_silence_says_nothing(self) -> None:
        self.assertIsNone(last_words(b""))
        self.assertIsNone(last_words(b" \n\r\n"))

    @given(st.binary(max_size=300))
    def test_whatever_it_was_it_fits_a_report(self, errors: bytes) -> None:
        told = last_words(errors)
        if told is not None:
            self.assertLessEqual(len(report_payload(1, told)), MAX_LATER_BYTES)
            self.assertTrue(told.text.isprintable())


class Raises:
    """Raises, for a traceback of its own."""

    def __call__(self) -> None:
        raise KeyError("shard")


class TestErrorFile(unittest.TestCase):
    """What is read of a file."""

    def test_an_exception_as_record_writes_it(self) -> None:
        data = nested("ValueError: no such shard: 7", {"py_callstack": STACK, "timestamp": "1750000000"})
        error = read_error_file(data)
        self.assertEqual(error, RankError("ValueError", "no such shard: 7", WHERE))
        assert error is not None
        self.assertEqual(error.text, f"ValueError: no such shard: 7, at {WHERE}")

    def test_a_real_exception(self) -> None:
        try:
            Raises()()
        except KeyError as error:
            told = read_error_file(recorded(error))
        assert told is not None
        self.assertEqual((told.type, told.message), ("KeyError", "'shard'"))
        self.assertRegex(told.line, r"/test_reports\.py:[0-9]+ in __call__: raise KeyError\(\"shard\"\)$")

    def test_every_shape_of_a_message(self) -> None:
        for data, right in (
            (b'{"message":"ValueError: boom"}', BOOM),
            (b'{"message":{"message":"ValueError: boom"}}', BOOM),
            (b'{"message":{"message":"ValueError: boom","errorCode":3,"extraInfo":{"timestamp":"1"}},"more":[]}', BOOM),
            (nested("ValueError: boom", None), BOOM),
            (nested("ValueError: boom", {"py_callstack": None}), BOOM),
            (nested("ValueError: boom", {"py_callstack": ["x"]}), BOOM),
            (nested("ValueError: boom", "text"), BOOM),
            (nested("ValueError"), RankError("ValueError", "", "")),
            (nested("ValueError: "), RankError("ValueError", "", "")),
            (nested("ValueError:boom"), BOOM),
            (nested("torch.cuda.OutOfMemoryError: CUDA"), RankError("torch.cuda.OutOfMemoryError", "CUDA", "")),
            (nested("Signal 9 (SIGKILL) received"), RankError("error", "Signal 9 (SIGKILL) received", "")),
            (nested("  ValueError: two\nlines\r\n\tand more "), RankError("ValueError", "two lines and more", "")),
            (nested(""), RankError("error", "", "")),
            (b'{"message":"\xff\xfe: x"}', RankError("error", "\ufffd\ufffd: x", "")),
        ):
            with self.subTest(data=data):
                self.assertEqual(read_error_file(data), right)

    def test_what_tells_of_no_exception_is_none(self) -> None:
        for data in (
            b"",
            b" ",
            b"\xff\xfe\x00",
            b"Traceback (most recent call last):",
            b'{"message":',
            b"[]",
            b"null",
            b'"ValueError: boom"',
            b"{}",
            b'{"message":null}',
            b'{"message":7}',
            b'{"message":["ValueError: boom"]}',
            b'{"message":{}}',
            b'{"message":{"message":{"message":"x"}}}',
            b"[" * 100_000,
            b'{"message":' + b"9" * 5000 + b"}",
            b'\xef\xbb\xbf{"message":"x"}',
        ):
            with self.subTest(data=data[:40]):
                self.assertIsNone(read_error_file(data))

    def test_the_text_is_one_printable_line(self) -> None:
        hostile = "E\u00e9: \x1b[31mred\x00\u202e\ud800 \u2028end\x85\nrank 0 exited"
        error = read_error_file(nested(hostile, {"py_callstack": 'File "\x1b", line 1, in \x07\n    \x7f'}))
        self.assertEqual(error, RankError("E\u00e9", "?[31mred??? end rank 0 exited", "?:1 in ?: ?"))
        assert error is not None
        self.assertTrue(error.text.isprintable())


class TestLastLine(unittest.TestCase):
    """The innermost frame of a traceback's text."""

    def test_each_traceback_has_its_last_frame(self) -> None:
        for stack, right in (
            (STACK, WHERE),
            ("", ""),
            ("ValueError: boom", ""),
            ('  File "a.py", line 3, in f', "a.py:3 in f"),
            ('  File "a.py", line 3, in f\n    go()\n    ^^\nE: x', "a.py:3 in f: go()"),
            ('  File "<string>", line 1, in <module>\nValueError: boom\n', "<string>:1 in <module>"),
            ('  File "<string>", line 1, in <module>\n  File "<string>", line 2, in f\nE', "<string>:2 in f"),
            ('  File "a b.py", line 3, in f\r\n    go()\r\nE', "a b.py:3 in f: go()"),
            ('  File "bad.py", line 3\n    x = = 1\nSyntaxError: invalid syntax', ""),
            (STACK + "\nDuring handling …\n" + '  File "b.py", line 1, in g\n    h()\nE', "b.py:1 in g: h()"),
        ):
            with self.subTest(stack=stack[-60:]):
                self.assertEqual(last_line(stack), right)


class TestReport(unittest.TestCase):
    """The frame's payload, both ways."""

    def test_a_report_comes_back_as_it_was(self) -> None:
        error = RankError("ValueError", 'a "b" \\ ü', WHERE)
        payload = report_payload(7, error)
        self.assertEqual(
            payload,
            b'{"rank":7,"type":"ValueError","message":"a \\"b\\" \\\\ \xc3\xbc",'
            b'"line":"train.py:12 in main: raise ValueError(\\"no such shard: 7\\")"}',
        )
        self.assertEqual(read_report(payload), (7, error))

    def test_the_longest_of_any_alphabet_fits_the_frame(self) -> None:
        for char in ("x", '"', "\\", "ü", "\u6f22", "\U0001f600", "\U0001d400", "\ud800", "\x00", "\x1b"):
            for size in (10, 120, 121, 580, 600, 5000):
                long = char * size
                error = read_error_file(
                    nested(f"{char * size}: {long}", {"py_callstack": f'File "{long}", line 1, in f'})
                )
                assert error is not None
                with self.subTest(char=char, size=size):
                    payload = report_payload((1 << 32) - 1, error)
                    self.assertLessEqual(len(payload), MAX_LATER_BYTES)
                    self.assertEqual(read_report(payload), ((1 << 32) - 1, error))

    @given(st.text(), st.text(), st.text(), st.integers(1, 2000))
    def test_any_exception_fits_the_frame_and_is_printable(
        self, name: str, message: str, code: str, times: int
    ) -> None:
        stack = f'  File "{code}", line 1, in {name}\n    {code * times}'
        error = read_error_file(nested(f"{name}: {message * times}", {"py_callstack": stack}))
        assert error is not None
        payload = report_payload(4_294_967_295, error)
        self.assertLessEqual(len(payload), MAX_LATER_BYTES)
        self.assertEqual(read_report(payload)[1], error)
        self.assertTrue(error.text.isprintable())
        for part, most in zip((error.type, error.message, error.line), MOST_CHARS.values(), strict=True):
            self.assertLessEqual(len(part), most)

    def test_a_cut_text_says_so(self) -> None:
        self.assertEqual(tidy("type", "x" * 120), "x" * 120)
        self.assertEqual(tidy("type", "x" * 121), "x" * 119 + "…")

    def test_what_another_agent_sends_is_made_short_and_printable_here(self) -> None:
        payload = json.dumps({"rank": 0, "type": "E\n" * 200, "message": "\x1b[2J", "line": "\n"}).encode()
        self.assertEqual(read_report(payload), (0, RankError(("E " * 200)[:119] + "…", "?[2J", "")))

    def test_what_is_no_report_is_refused(self) -> None:
        good = {"rank": 0, "type": "E", "message": "m", "line": "l"}
        for name, value in (
            *(
                (r"rank .*: it must be a whole number from 0 to 4294967295", {**good, "rank": rank})
                for rank in (-1, 1 << 32, 1.0, True, None, "0", [0])
            ),
            *((f"{key} 7: it must be a text", {**good, key: 7}) for key in ("type", "message", "line")),
            (r"message '\\ud800': it must be a text", {**good, "message": "\ud800"}),
            ("the key 'line' is missing", {"rank": 0, "type": "E", "message": "m"}),
            ("the key 'more' is not known", {**good, "more": 1}),
            ("cannot be read", [good]),
            ("cannot be read", 7),
        ):
            with self.subTest(value=value), self.assertRaisesRegex(WireError, name):
                read_report(json.dumps(value).encode())
        for payload in (
            b"",
            b"\0",
            b"\xff",
            b"{",
            b'{"rank":0,"rank":1,"type":"","message":"","line":""}',
            b"[" * 4096,
        ):
            with (
                self.subTest(payload=payload[:20]),
                self.assertRaisesRegex(WireError, "a rank's report cannot be read"),
            ):
                read_report(payload)


class TestText(unittest.TestCase):
    """The same in one line, for people."""

    def test_what_is_not_there_is_not_told(self) -> None:
        for error, right in (
            (RankError("E", "m", "l"), "E: m, at l"),
            (RankError("E", "", "l"), "E, at l"),
            (RankError("E", "m", ""), "E: m"),
            (RankError("E", "", ""), "E"),
        ):
            with self.subTest(error):
                self.assertEqual(error.text, right)
