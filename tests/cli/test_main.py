"""The command line: one line and status 2 for what it cannot take, and no secret in it."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import tempfile
import unittest
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from flodl_tw.cli import main as cli
from flodl_tw.cli import operator, rehearse, status, worker
from flodl_tw.core.errors import NotYetError

TOKEN = "00112233445566778899aabbccddeeff"
NOT_SHOWN = (
    "flodl-tw: --token (not shown): every user of this machine can see an argument; "
    "use --token-file or FLODL_JOIN_TOKEN\n"
)
WRONG: tuple[tuple[tuple[str, ...], str], ...] = (
    # a command, and its line: the whole of it, or how it begins where it ends in "; "
    ((), "the following arguments are required: COMMAND; flodl-tw --help lists the options"),
    (
        ("join", "--", "true"),
        "HOST[:PORT]: there is none; name the controller, or a file whose join: block does with --fdl-yml",
    ),
    (("join", "--fdl-yml"), "argument --fdl-yml: expected one argument; flodl-tw join --help lists the options"),
    (
        ("join", "--fdl-yml", "/nonexistent/fdl.yml", "--", "true"),
        "--fdl-yml /nonexistent/fdl.yml: it cannot be read (No such file or directory); check the path and its owner",
    ),
    (("run", "--fdl-yml", "x", "--", "true"), "unrecognized arguments: --fdl-yml x; "),
    (("token", "a", "b"), "unrecognized arguments: b; flodl-tw token --help lists the options"),
    (("token", "--mode", "644"), "unrecognized arguments: --mode; "),
    (("join", "gpu-a", "--nprocs", "1"), "unrecognized arguments: --nprocs 1; "),
    (("join", "gpu-a", "--nproc"), "argument --nproc: expected one argument; flodl-tw join --help lists the options"),
    (
        ("token", "--", "-x"),
        "token runs no program, so nothing may stand after --; flodl-tw token --help lists the options",
    ),
    (("status", "gpu-a", "--", "true"), "status runs no program, so nothing may stand after --; "),
    (("join", "gpu-a", "--persis"), "unrecognized arguments: --persis; "),
    (
        ("join", "gpu-a", "python", "x.py"),
        "unrecognized arguments: python x.py (PROGRAM and its arguments stand after --); ",
    ),
    (
        ("status", "gpu-a", "--token-file", "x"),
        "unrecognized arguments: --token-file x; ",
    ),
    (("join", "gpu-a"), "PROGRAM: there is none; give it after --, with its arguments"),
    (("join", "gpu-a", "--"), "PROGRAM: there is none; give it after --, with its arguments"),
    (
        ("join", "gpu-a", "--", "no-such-program"),
        "PROGRAM 'no-such-program': it is not on PATH; give the path of an executable file",
    ),
    (
        ("join", "gpu-a", "--stop-grace", "x", "--", "true"),
        "--stop-grace 'x': the limits are 0 and 86400; give a number between them",
    ),
    (
        ("join", "gpu-a", "--nproc", "0", "--", "true"),
        "--nproc '0': the limits are 1 and 256; give a whole number between them",
    ),
    (
        ("join", "gpu-a:0", "--", "true"),
        "HOST[:PORT] 'gpu-a:0': 'gpu-a:0' has the port '0', the limits are 1 and 65535: write HOST:PORT; "
        "name the controller",
    ),
    (
        ("start", "gpu-a:x"),
        "HOST[:PORT] 'gpu-a:x': 'gpu-a:x' has the port 'x', the limits are 1 and 65535: write HOST:PORT; "
        "name the controller",
    ),
    (
        ("rehearse", "gpu-a:x"),
        "HOST[:PORT] 'gpu-a:x': 'gpu-a:x' has the port 'x', the limits are 1 and 65535: write HOST:PORT; "
        "name the controller",
    ),
    (
        ("rehearse", "--hosts", "4097"),
        "--hosts '4097': the limits are 1 and 4096; give a whole number between them",
    ),
    (
        ("rehearse", "--bad", "model"),
        "--bad 'model': the kinds are nccl, vendor, dataset, duplicate; give some of them, with commas between",
    ),
    (("rehearse", "gpu-a", "--model-sig", "x"), "unrecognized arguments: --model-sig x; "),
)


class CommandTestCase(unittest.TestCase):
    """Commands in this process, up to where a reactor would run."""

    def setUp(self) -> None:
        kept = {name: text for name, text in os.environ.items() if not name.startswith("FLODL_")}
        patched = mock.patch.dict(os.environ, kept, clear=True)
        patched.start()
        self.addCleanup(patched.stop)
        for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
            # A command takes its process for its own.
            self.addCleanup(signal.signal, number, signal.getsignal(number))

    def run_main(self, *words: str) -> tuple[int, str]:
        """Status and errors of ``flodl-tw words``."""
        err = io.StringIO()
        with contextlib.redirect_stderr(err):
            try:
                status = cli.main(words)
            except SystemExit as end:
                status = int(str(end.code))
        return status, err.getvalue()

    def called(self, command: str, *words: str) -> tuple[Mapping[str, Any], list[str], Mapping[str, str]]:
        """What a command is called with: options, program, environment."""
        calls: list[tuple[Mapping[str, Any], list[str], Mapping[str, str]]] = []

        def record(options: Mapping[str, Any], program: list[str], environ: Mapping[str, str]) -> int:
            calls.append((options, program, environ))
            return 7

        module = {"join": worker, "run": worker, "rehearse": rehearse, "status": status, "wait": status}.get(
            command, operator
        )
        with mock.patch.object(module, command, record):
            self.assertEqual(self.run_main(command, *words), (7, ""))
        return calls[0]


class TestSecrets(CommandTestCase):
    """A token in an argument is refused and not repeated."""

    def test_a_token_as_an_argument_is_refused_without_showing_it(self) -> None:
        for words in (
            ("--token", TOKEN),
            ("join", "gpu-a", "--token", TOKEN, "--", "true"),
            ("join", "gpu-a", f"--token={TOKEN}", "--", "true"),
            ("join", "--nproc", "1", "--host", "a", "--persist", "--token", TOKEN, "gpu-a", "--", "true"),
            ("start", f"--token={TOKEN}"),
            ("abort", "gpu-a", "--reason", "x", "--token", TOKEN),
            ("status", "--token", TOKEN),
            ("rehearse", "--hosts", "2", "--token", TOKEN),
            ("run", "-n", "2", "--token", TOKEN, "--", "true"),
        ):
            with self.subTest(words[0], words=len(words)):
                self.assertEqual(self.run_main(*words), (2, NOT_SHOWN))

    def test_a_mistyped_token_is_not_repeated(self) -> None:
        for words in (("join", "gpu-a", "--tokn", TOKEN, "--", "true"), ("start", "gpu-a", TOKEN), (TOKEN,)):
            with self.subTest(words):
                status, err = self.run_main(*words)
                self.assertEqual(status, 2)
                self.assertIn("(not shown)", err)
                self.assertNotIn(TOKEN[:16], err)

    def test_a_program_s_own_token_is_its_own(self) -> None:
        _, program, _ = self.called("join", "gpu-a", "--", "true", "--token", "x")
        self.assertEqual(program, ["true", "--token", "x"])

    def test_nothing_that_is_started_inherits_the_token(self) -> None:
        os.environ["FLODL_JOIN_TOKEN"] = TOKEN
        os.environ["FLODL_INTERNAL_AGENT_JSON"] = "7b7d"
        _, _, environ = self.called("join", "gpu-a", "--", "true")
        self.assertEqual(environ["FLODL_JOIN_TOKEN"], TOKEN)
        self.assertNotIn("FLODL_JOIN_TOKEN", os.environ)
        self.assertNotIn("FLODL_INTERNAL_AGENT_JSON", os.environ)

    def test_a_wrong_token_in_the_environment_is_not_repeated(self) -> None:
        os.environ["FLODL_JOIN_TOKEN"] = TOKEN[:30]
        for words in (("join", "gpu-a", "--", "true"), ("start",), ("abort",)):
            with self.subTest(words):
                os.environ["FLODL_JOIN_TOKEN"] = TOKEN[:30]
                status, err = self.run_main(*words)
                self.assertEqual(status, 2)
                self.assertEqual(
                    err,
                    "flodl-tw: FLODL_JOIN_TOKEN (not shown): a token is 32 hex digits, this is 30 characters; "
                    "make one with: flodl-tw token, or unset it\n",
                )

    def test_a_token_file_is_named_and_its_text_is_not(self) -> None:
        with tempfile.TemporaryDirectory(prefix="flodl-tw-") as folder:
            path = Path(folder, "token")
            path.write_text(TOKEN)
            path.chmod(0o644)
            status, err = self.run_main("start", "--token-file", str(path))
        self.assertEqual(status, 2)
        self.assertIn(f"--token-file {path}: others can read it (mode 0644)", err)
        self.assertNotIn(TOKEN, err)


class TestWrongCommands(CommandTestCase):
    """One line, and status 2."""

    def test_what_cannot_be_taken_is_one_line(self) -> None:
        for words, line in WRONG:
            with self.subTest(words):
                status, err = self.run_main(*words)
                self.assertEqual((status, err.count("\n")), (2, 1))
                self.assertTrue(
                    err.startswith(f"flodl-tw: {line}") if line.endswith("; ") else err == f"flodl-tw: {line}\n", err
                )

    def test_an_unknown_command_is_one_line(self) -> None:
        status, err = self.run_main("jion", "gpu-a")
        self.assertEqual((status, err.count("\n")), (2, 1))
        self.assertIn("jion", err)

    def test_help_and_version_end_with_0(self) -> None:
        for words in (("--help",), ("--version",), ("join", "--help"), ("run", "--help"), ("abort", "--help")):
            with self.subTest(words), contextlib.redirect_stdout(io.StringIO()) as out:
                self.assertEqual(self.run_main(*words), (0, ""))
                self.assertTrue(out.getvalue())


class TestWords(CommandTestCase):
    """How the words are split into options and program."""

    def test_what_follows_the_first_dashes_is_the_program_s_whatever_it_looks_like(self) -> None:
        words = ("python", "--host", "x", "--", "--persist", "-n", "4", "--help", "")
        options, program, _ = self.called("join", "gpu-a", "--host", "gpu-b", "--", *words)
        self.assertEqual(program, list(words))
        self.assertEqual((options["host"], options["persist"], options["controller"]), ("gpu-b", None, "gpu-a"))

    def test_options_may_stand_before_and_after_the_controller(self) -> None:
        options, _, _ = self.called("join", "--nproc", "2", "gpu-a:1", "--stop-grace=3", "--persist", "--", "true")
        self.assertEqual(
            [options[name] for name in ("nproc", "controller", "stop-grace", "persist", "devices")],
            ["2", "gpu-a:1", "3", True, None],
        )

    def test_run_has_a_short_n(self) -> None:
        for words in (("-n", "4"), ("-n4",), ("--nproc", "4")):
            with self.subTest(words):
                options, program, _ = self.called("run", *words, "--hosts", "2", "--", "true")
                self.assertEqual((options["nproc"], options["hosts"], program), ("4", "2", ["true"]))

    def test_a_rehearsal_has_few_options(self) -> None:
        words = ("--hosts", "32", "--gpus=8", "--bad", "nccl,vendor", "--secs", "5", "--token-file", "x")
        options, _, _ = self.called("rehearse", "gpu-a:1", *words)
        self.assertEqual(
            options,
            {
                "command": "rehearse",
                "address": "gpu-a:1",
                "hosts": "32",
                "gpus": "8",
                "bad": "nccl,vendor",
                "secs": "5",
                "token-file": "x",
            },
        )

    def test_the_operator_s_commands_take_an_address_or_none(self) -> None:
        for command in ("status", "wait", "start", "abort", "rehearse"):
            with self.subTest(command):
                self.assertIsNone(self.called(command)[0]["address"])
                self.assertEqual(self.called(command, "gpu-a:1")[0]["address"], "gpu-a:1")


class TestLaunched(CommandTestCase):
    """``flodl-tw-agent``, which a launcher starts."""

    def run_agent(self, *words: str) -> tuple[int, str]:
        err = io.StringIO()
        with contextlib.redirect_stderr(err), mock.patch.object(sys, "argv", ["flodl-tw-agent", *words]):
            return cli.agent_main(), err.getvalue()

    def test_without_orders_it_says_how_it_is_started(self) -> None:
        line = "FLODL_INTERNAL_AGENT_JSON: it is not set; start this by fdl join --bin, or use flodl-tw join"
        for environ in ({}, {"FLODL_INTERNAL_AGENT_JSON": "", "FLODL_INTERNAL_MODEL_SIG_PROBE": ""}):
            with self.subTest(environ), mock.patch.dict(os.environ, environ):
                self.assertEqual(self.run_agent("true"), (2, f"flodl-tw: {line}\n"))

    def test_what_may_be_better_another_time_is_a_line_and_status_1(self) -> None:
        with mock.patch("flodl_tw.cli.worker.bootstrapped", side_effect=NotYetError("nvidia-smi is late")):
            self.assertEqual(self.run_agent("true"), (1, "flodl-tw: nvidia-smi is late\n"))

    def test_orders_that_cannot_be_read_are_one_line_without_them(self) -> None:
        os.environ["FLODL_INTERNAL_AGENT_JSON"] = TOKEN
        status, err = self.run_agent("true")
        self.assertEqual((status, err.count("\n")), (2, 1))
        self.assertNotIn(TOKEN, err)
        self.assertNotIn("FLODL_INTERNAL_AGENT_JSON", os.environ)

    def test_asked_for_a_signature_it_becomes_the_program_whose_answer_that_is(self) -> None:
        os.environ["FLODL_INTERNAL_MODEL_SIG_PROBE"] = "1"
        with mock.patch.object(os, "execve", side_effect=SystemExit(0)) as becomes, self.assertRaises(SystemExit):
            self.run_agent("sh", "-c", "exit")
        ((path, words, environ),) = (call.args for call in becomes.call_args_list)
        self.assertEqual((os.path.basename(path), words[1:]), ("sh", ("-c", "exit")))
        self.assertEqual(environ["FLODL_INTERNAL_MODEL_SIG_PROBE"], "1")
