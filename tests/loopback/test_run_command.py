"""``flodl-tw run``, and what an operator does with a real controller: status, start, abort and join --check."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from flodl_tw.core.messages import Abort
from flodl_tw.core.phrases import join_commands
from tests.loopback.agents import PATIENCE, PYTHON, SH, TOKEN, AgentTestCase, Command, in_sessions
from tests.loopback.process import LOOPBACK, Twistd, body_of, until

MEET = str(Path(__file__).parents[2] / "examples" / "meet.py")


class RunTests(AgentTestCase):
    """A whole world in one command."""

    def run_world(self, *words: str, **environ: str) -> Command:
        return self.command("run", *words, environ={"FLODL_HOST_NAME": "box", **environ})

    def test_ranks_of_two_hosts_meet_and_everybody_is_there(self) -> None:
        command = self.run_world("-n", "4", "--hosts", "2", "--", sys.executable, MEET)
        self.assertEqual(command.ended(), 0, command.err)
        self.assertEqual(
            command.out.decode().splitlines(),
            [
                "[box-0:r0] everybody is here:",
                "[box-0:r0]   rank 0 of 4, local rank 0 of 2 on host box-0 (0 of 2), GPUs: all",
                "[box-0:r0]   rank 1 of 4, local rank 1 of 2 on host box-0 (0 of 2), GPUs: all",
                "[box-0:r0]   rank 2 of 4, local rank 0 of 2 on host box-1 (1 of 2), GPUs: all",
                "[box-0:r0]   rank 3 of 4, local rank 1 of 2 on host box-1 (1 of 2), GPUs: all",
            ],
        )

    def test_the_status_is_the_first_failing_ranks_and_the_others_are_ended_with_nothing_left(self) -> None:
        failing = '[ "$RANK" = 2 ] && exit 7; exec sleep 600'
        worlds = {
            7: self.run_world("-n", "4", "--hosts", "2", "--stop-grace", "600", "--", *SH, failing),
            139: self.run_world(
                "-n", "2", "--stop-grace", "600", "--", *SH, '[ "$RANK" = 0 ] && kill -SEGV $$; exec sleep 600'
            ),
            0: self.run_world("-n", "1", "--", "true"),
            2: self.run_world("-n", "2", "--hosts", "3", "--", "true"),
        }
        for status, command in worlds.items():
            with self.subTest(status=status):
                self.assertEqual(command.ended(), status, command.err)
                # The command has its own session, and its ranks' end before it does.
                self.assertEqual(in_sessions([command.pid]), [])
        self.assertIn("box-1: rank 2 exited with code 7", worlds[7].err)
        self.assertIn("--hosts '3': 2 ranks in all", worlds[2].err)

    def test_every_host_is_told_what_a_rank_that_failed_said_last(self) -> None:
        text = '[ "$RANK" = 0 ] || exec sleep 600; head -c 30000 /dev/zero >&2; echo >&2; echo "no shard" >&2; exit 3'
        for _ in range(3):
            command = self.run_world("-n", "2", "--hosts", "2", "--", *SH, text)
            self.assertEqual(command.ended(), 3, command.err[-2000:])
            line = command.lines("the run was aborted: ")[0]
            self.assertRegex(line, "rank 0 of host 'box-[01]' exited with code 3 [(]its last line: no shard[)]")

    def test_a_count_of_ranks_leaves_what_gpus_there_are_visible(self) -> None:
        for environ, right in (({}, b""), ({"CUDA_VISIBLE_DEVICES": "4,5"}, b"CUDA_VISIBLE_DEVICES=4,5\n")):
            command = self.run_world("-n", "1", "--", *SH, "env | grep VISIBLE; exit 0", **environ)
            self.assertEqual(command.ended(), 0, command.err)
            self.assertEqual(command.out, b"[box:r0] " + right if right else b"")

    def test_rank_0_may_ask_at_the_terminal_unless_it_is_told_not_to(self) -> None:
        asks = "import os\nrank = os.environ['RANK']\n"
        asks += "try: print(rank, input())\nexcept EOFError: print(rank, 'nothing')"
        for option, right in (((), b"hello"), (("--stdin", "none"), b"nothing")):
            ours, theirs = os.openpty()
            self.addCleanup(os.close, ours)
            words = ("run", "-n", "2", "--hosts", "2", *option, "--", *PYTHON, asks)
            command = self.command(*words, environ={"FLODL_HOST_NAME": "box"}, stdin=theirs)
            os.close(theirs)
            os.write(ours, b"hello\n")
            self.assertEqual(command.ended(), 0, command.err)
            told = sorted(line.partition(b"] ")[2] for line in command.out.splitlines())
            self.assertEqual(told, [b"0 " + right, b"1 nothing"])

    def test_sigterm_ends_everything_with_143_and_sigint_with_130(self) -> None:
        text = "echo begun; sleep 600 & exec sleep 600"
        worlds = {
            number: self.run_world("-n", "2", "--hosts", "2", "--stop-grace", "600", "--", *SH, text)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        for number, command in worlds.items():
            until(lambda command=command: command.out.count(b"begun") == 2, "two ranks", PATIENCE)
            children = command.children()
            self.assertEqual(len(children), 3)
            command.send_signal(number)
            self.assertEqual(command.ended(), 128 + number, command.err)
            until(lambda children=children: not in_sessions(children), "the end of all that it started")

    def test_what_is_meant_for_a_worker_elsewhere_is_not_its_own(self) -> None:
        command = self.run_world(
            "-n",
            "1",
            "--",
            *SH,
            "env",
            FLODL_JOIN_TOKEN=TOKEN,
            FLODL_TW_HOST="elsewhere",
            FLODL_TW_DATASET_SIG="ab" * 32,
            FLODL_TW_TOKEN_FILE="/nonexistent/token",
        )
        self.assertEqual(command.ended(), 0, command.err)
        self.assertIn(b"[box:r0] RANK=0\n", command.out)
        for secret in (TOKEN.encode(), b"FLODL_TW_HOST", b"FLODL_TW_D", b"FLODL_TW_T", b"JOIN_TOKEN"):
            self.assertNotIn(secret, command.out)


class Operator(AgentTestCase):
    """An operator's commands.  One test's commands run side by side where they change nothing."""

    def operator(self, controller: Twistd | int, *words: str, token: str | None = None) -> Command:
        """A command for a controller; its address comes after the first word."""
        port = controller if isinstance(controller, int) else controller.port
        environ = {} if token is None else {"FLODL_JOIN_TOKEN": token}
        return self.command(words[0], f"{LOOPBACK}:{port}", *words[1:], environ=environ)

    def says(self, command: Command, status: int, *texts: str) -> None:
        """It ends with this status, having said this, to somebody who expects it there, and no token."""
        self.assertEqual(command.ended(), status, command.err + command.out.decode())
        told = command.out.decode() + command.err
        for text in texts:
            self.assertIn(text, told)
        for secret in (TOKEN, TOKEN[::-1]):
            self.assertNotIn(secret, told)

    def test_status_and_check_under_open_admission_change_nothing(self) -> None:
        controller = self.start("--min-rank-start", "9", "--dataset-sig", "ab" * 32)
        self.joined(controller, "gpu-a", 2, dataset_sig=b"\xab" * 32)
        before = controller.state()
        shown = self.operator(controller, "status")
        as_json = self.operator(controller, "status", "--json")
        good = ("--check", "--nproc", "2", "--dataset-sig", "ab" * 32)
        fits = self.operator(controller, "join", *good, "--host", "gpu-b")
        taken = self.operator(controller, "join", *good, "--host", "gpu-a")
        wrong = self.operator(controller, "join", "--check", "--nproc", "2", "--host", "gpu-b")
        nobody = self.operator(1, "status", "--json")
        self.says(shown, 0, "gpu-a", "0-1")
        self.says(as_json, 0)
        self.assertEqual({**json.loads(as_json.out), **COUNTDOWNS}, {**before, **COUNTDOWNS})
        self.says(fits, 0, "would admit this host: ranks 2-3")
        self.says(taken, 1, "would refuse this host: duplicate-host: ")
        self.says(wrong, 2, "would refuse this host: dataset-mismatch: ")
        self.says(nobody, 1, "nothing answers at 127.0.0.1:1")
        self.assertEqual(nobody.out, b"", "what went wrong belongs to the error stream")
        self.assertEqual({**controller.state(), **COUNTDOWNS}, {**before, **COUNTDOWNS})
        self.assertNotIn("gpu-b", controller.log)

    def test_start_and_abort_from_loopback_need_no_token_and_a_check_does_where_the_run_has_one(self) -> None:
        controller = self.start("--min-rank-start", "2", "--start", "manual", environ={"FLODL_JOIN_TOKEN": TOKEN})
        host = self.dial(controller, token=bytes.fromhex(TOKEN))
        host.join("gpu-a", 2)
        token_file = controller.folder / "given"
        token_file.write_text(f"{TOKEN}\n")
        token_file.chmod(0o600)
        none = self.operator(controller, "join", *CHECK)
        wrong = self.operator(controller, "join", *CHECK, token=TOKEN[::-1])
        right = self.operator(controller, "join", *CHECK, "--token-file", str(token_file))
        argument = self.operator(controller, "start", "--token", TOKEN)
        self.says(none, 2, "refuses", "it came without a token", "--token-file FILE or FLODL_JOIN_TOKEN")
        self.says(wrong, 2, "refuses", "is not this run's", "--token-file FILE or FLODL_JOIN_TOKEN")
        for command in (none, wrong):
            self.assertNotIn("gpu-a", command.err + command.out.decode())
        self.says(right, 0, "would admit this host: rank 2")
        self.says(argument, 2, "every user of this machine can see an argument")
        controller.state_is(phase="staging", joined_hosts=1, start_armed=False)
        start = self.operator(controller, "start", "--token-file", str(token_file))
        self.says(start, 0, "is started: 2 ranks joined, quorum 2")
        controller.state_is(phase="training")
        again = self.operator(controller, "start", token=TOKEN)
        abort = self.operator(controller, "abort", "--reason", "wrong data set", token=TOKEN[::-1])
        self.says(again, 1)
        self.says(abort, 0, "is aborted: 1 host told")
        self.assertEqual(host.rest()[-1], Abort("aborted by the operator: wrong data set"))
        self.assertEqual(controller.ended(), 1)
        self.assertNotIn(TOKEN, controller.log)

    def test_an_abort_ends_a_real_agent_with_1_and_a_watch_sees_it(self) -> None:
        controller = self.start("--target-ranks", "1", "--after-run", "hold")
        agent = self.join(controller.port, "gpu-a", program=(*SH, "echo begun; exec sleep 600"))
        watch = self.operator(controller, "status", "--watch")
        agent.printed(b"[gpu-a:r0] begun\n")
        until(lambda: b"training" in watch.out, "the state", PATIENCE)
        self.says(self.operator(controller, "abort", "--reason", "enough"), 0, "1 host told")
        self.assertEqual(agent.ended(), 1, agent.err)
        self.assertIn("the run was aborted: aborted by the operator: enough", agent.err)
        self.assertEqual(watch.ended(), 1)
        self.assertIn(b"failed", watch.out)

    def test_a_watch_ends_by_the_signal_that_it_gets(self) -> None:
        controller = self.start("--min-rank-start", "9")
        watches = {number: self.operator(controller, "status", "--watch") for number in (signal.SIGINT, signal.SIGTERM)}
        for number, watch in watches.items():
            watch.printed(b"waiting")
            watch.send_signal(number)
        for number, watch in watches.items():
            with self.subTest(signal=number.name):
                self.assertIn(watch.ended(), (-number, 128 + number), watch.err)
                self.assertEqual(watch.err, "")

    def test_a_status_whose_reader_has_gone_is_no_fault_of_the_program(self) -> None:
        controller = self.start("--min-rank-start", "9")
        read, write = os.pipe()
        os.close(read)
        piped = self.command("status", f"{LOOPBACK}:{controller.port}", stdout=write)
        os.close(write)
        self.assertNotEqual(piped.ended(), 0)
        self.assertNotIn("fault of the program", piped.err)

    def test_the_page_and_the_log_give_the_line_that_joins(self) -> None:
        controller = self.start("--min-rank-start", "1", "--after-run", "hold", "--target-ranks", "1")
        line, _ = join_commands(f"{LOOPBACK}:{controller.port}", False)
        self.assertEqual(line, f"flodl-tw join {LOOPBACK}:{controller.port} -- PROGRAM")
        controller.said(line)
        page = body_of(controller.http(b"GET / HTTP/1.0\r\nAccept: text/html\r\n\r\n"))
        self.assertIn(line.encode(), page)
        words = line.split()[1:]
        words[words.index("--") : words.index("--") + 2] = ["--nproc", "1", "--", "true"]
        self.assertEqual(self.command(*words).ended(), 0)
        controller.state_is(phase="done")


CHECK = ("--check", "--nproc", "1", "--host", "gpu-b")
COUNTDOWNS = {"window_remaining_secs": 0, "cap_remaining_secs": 0}
