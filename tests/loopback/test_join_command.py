"""A real ``flodl-tw join``: what its ranks are told, and the status that each way of ending leads to."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from flodl_tw.cli.terminal import SAME_SECS
from flodl_tw.core.messages import RankExited
from tests.loopback.agents import (
    BASE,
    PATIENCE,
    PYTHON,
    SALT,
    SH,
    TOKEN,
    AgentTestCase,
    Command,
    Launcher,
    hexed,
    unhexed,
)
from tests.loopback.process import LOOPBACK, alive, free_port, shared, until

# Leaves its environment in a file, in one go: as it is when its program starts.
TELL = (*SH, 'cp /proc/$$/environ "$1/part.$$" && mv "$1/part.$$" "$1/env.$FLODL_HOST_NAME.$FLODL_INTERNAL_LOCAL_RANK"')
STALE = {
    "RANK": "7",
    "WORLD_SIZE": "64",
    "LOCAL_RANK": "3",
    "SLURM_PROCID": "5",
    "OMPI_COMM_WORLD_RANK": "2",
    "PMI_RANK": "4",
    "TORCHELASTIC_RUN_ID": "old",
    "TORCHELASTIC_ERROR_FILE": "/tmp/old",
}
SECRET = {
    "FLODL_TW_DATA_PATH": "/data",
    "FLODL_TW_STOP_GRACE": "7",
    "ROCR_VISIBLE_DEVICES": "0",
    "GPU_DEVICE_ORDINAL": "0",
    "FLODL_INTERNAL_FULL_CLUSTER_JSON": "00",
}
ORDINARY = (1 << 31) - 1
"""Signals 1 to 31, in a mask: those beyond are the C library's, and what started the tests may ignore one."""
KEPT = {"MASTER_ADDR": "old", "MASTER_PORT": "1234", "SLURM_JOB_ID": "77", "MINE": "a=b"}


def environ_in(path: Path) -> dict[str, str]:
    """The variables in a copy of /proc/PID/environ."""
    entries = path.read_text().split("\0")[:-1]
    return {name: value for name, _, value in (entry.partition("=") for entry in entries)}


def flodls(index: int, host: str, mask: str) -> dict[str, str]:
    """flodl's variables of a rank, but for its envelope."""
    return {
        "FLODL_INTERNAL_LOCAL_RANK": str(index),
        "FLODL_HOST_NAME": host,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": mask,
        "HIP_VISIBLE_DEVICES": mask,
        "PYTHONUNBUFFERED": "1",
    }


class RankEnvironment(AgentTestCase):
    """What each rank finds in its environment: all of it, exactly."""

    def told(self, folder: Path, host: str, index: int) -> tuple[dict[str, str], dict[str, Any]]:
        """A rank's variables without its envelope, and the envelope."""
        environ = environ_in(folder / f"env.{host}.{index}")
        self.assertNotIn(TOKEN, str(environ))
        text = environ.pop("FLODL_INTERNAL_CLUSTER_JSON")
        envelope: dict[str, Any] = unhexed(text)
        self.assertNotIn(TOKEN, json.dumps(envelope))
        return environ, envelope

    def test_two_agents_give_each_rank_flodls_and_torchruns_variables_and_no_stale_or_secret_one(self) -> None:
        folder = self.folder()
        options = ("--target-ranks", "4", "--after-run", "hold", "--store", "off")
        controller = self.start(*options, environ={"FLODL_JOIN_TOKEN": TOKEN})
        token_file = folder / "token"
        token_file.write_text(f"{TOKEN}\n")
        token_file.chmod(0o600)
        program = (*TELL, "sh", str(folder))
        first = self.join(
            controller.port,
            "gpu-a",
            "--nproc",
            "3",
            program=program,
            environ={**STALE, **SECRET, **KEPT, "FLODL_JOIN_TOKEN": TOKEN},
        )
        controller.state_is(PATIENCE, joined_hosts=1)
        second = self.join(
            controller.port, "gpu-b", program=program, environ={"FLODL_TW_TOKEN_FILE": str(token_file), **KEPT}
        )
        self.assertEqual([first.ended(), second.ended()], [0, 0], first.err + second.err)
        controller.state_is(phase="done", joined_ranks=4, joined_hosts=2)

        (line,) = first.lines("variables that were set already")
        self.assertTrue(line.endswith(f"replaced or removed for the ranks: {', '.join(sorted(STALE))}"), line)
        self.assertEqual(second.lines("variables that were set already"), [])

        salts, run_ids = set(), set()
        for rank, (host, index, size) in enumerate(
            (("gpu-a", 0, 3), ("gpu-a", 1, 3), ("gpu-a", 2, 3), ("gpu-b", 0, 1))
        ):
            with self.subTest(rank=rank):
                environ, envelope = self.told(folder, host, index)
                group = int(host == "gpu-b")
                run_id = envelope["flodl_tw"]["run_id"]
                error_file = Path(environ.pop("TORCHELASTIC_ERROR_FILE"))
                self.assertEqual((error_file.name, error_file.parent.exists()), (f"rank.{rank:03d}.json", False))
                self.assertEqual(
                    environ,
                    {
                        **BASE,
                        **KEPT,
                        **flodls(index, host, "-1"),
                        "RANK": str(rank),
                        "LOCAL_RANK": str(index),
                        "WORLD_SIZE": "4",
                        "LOCAL_WORLD_SIZE": str(size),
                        "GROUP_RANK": str(group),
                        "GROUP_WORLD_SIZE": "2",
                        "ROLE_NAME": "default",
                        "ROLE_RANK": str(rank),
                        "ROLE_WORLD_SIZE": "4",
                        "TORCHELASTIC_RUN_ID": run_id,
                        "TORCHELASTIC_RESTART_COUNT": "0",
                        "TORCHELASTIC_MAX_RESTARTS": "0",
                        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
                        "FLODL_TW_RANK0_ADDR": LOOPBACK,
                        **({"OMP_NUM_THREADS": "1"} if size > 1 else {}),
                    },
                )
                self.assertEqual(
                    envelope,
                    {
                        "controller": {"host": LOOPBACK, "port": controller.port},
                        "world_size": 4,
                        "num_workers": 2,
                        "worker": {
                            "host": host,
                            "ranks": [3] if group else [0, 1, 2],
                            "local_devices": list(range(size)),
                            "nccl_socket_ifname": "",
                            "path": "",
                            **({} if group else {"data_path": "/data"}),
                        },
                        "salt": envelope["salt"],
                        "flodl_tw": {
                            "group_rank": group,
                            "group_world_size": 2,
                            "run_id": run_id,
                            "store": False,
                            "reports": True,
                            "heartbeats": True,
                            "rank0_address": LOOPBACK,
                            "environ": {},
                        },
                    },
                )
                salts.add(envelope["salt"])
                run_ids.add(run_id)
        self.assertEqual((len(salts), len(run_ids)), (1, 1))
        self.assertRegex(salts.pop(), r"\A[0-9a-f]{32}\Z")
        self.assertTrue(run_ids.pop())

    def test_each_rank_sees_the_gpus_of_its_host_or_its_own_as_asked(self) -> None:
        tools = self.folder()
        tool = tools / "nvidia-smi"
        tool.write_text("#!/bin/sh\n" + "".join(f"echo {index}, , H100, 81559, 9.0\n" for index in range(8)))
        tool.chmod(0o755)
        environ = {"PATH": f"{tools}:{BASE['PATH']}", "CUDA_VISIBLE_DEVICES": "6,4,2"}
        for words, seen in (
            (("--devices", "1,0"), [("4,6", "0"), ("4,6", "1")]),
            (("--devices", "1,0", "--virtual-local-rank"), [("4", "0"), ("6", "0")]),
            (("--devices", "all", "--nproc", "1"), [("6,4,2", "0")]),
        ):
            with self.subTest(words=words):
                folder = self.folder()
                controller = self.start("--target-ranks", str(len(seen)))
                program = (*TELL, "sh", str(folder))
                agent = self.join(controller.port, "gpu-a", *words, program=program, environ=environ)
                self.assertEqual(agent.ended(), 0, agent.err)
                told = [environ_in(folder / f"env.gpu-a.{index}") for index in range(len(seen))]
                self.assertEqual([(each["CUDA_VISIBLE_DEVICES"], each["LOCAL_RANK"]) for each in told], seen)

    def test_the_cluster_files_variables_and_rank_0s_own_store_are_in_each_ranks_environment(self) -> None:
        folder = self.folder()
        path = folder / "fdl.yml"
        path.write_text(
            "inherit-from: base.yml\n"
            "cluster:\n  controller: {host: head, port: 1, path: /srv, join: {discovery: true, min_rank_start: 2}}\n"
            "  workers:\n  - {host: gpu-b, local_devices: all, nccl_socket_ifname: ib0, path: x, "
            "env: {NCCL_DEBUG: INFO}}\n"
            "  env: {NCCL_DEBUG: WARN, NCCL_P2P_DISABLE: 1}\n"
        )
        controller = self.start("--cluster", str(path), "--target-ranks", "2", "--nccl-socket-ifname", "eth1")
        controller.said("inherit-from (line 1): it is not merged")
        controller.said("has no use for cluster.controller.path (line 3)")
        program = (*TELL, "sh", str(folder))
        agents = [
            self.join(
                controller.port, host, "--master-addr", "rank0", program=program, environ={"NCCL_P2P_DISABLE": own}
            )
            for host, own in (("gpu-a", "0"), ("gpu-b", ""))
        ]
        self.assertEqual([agent.ended() for agent in agents], [0, 0], controller.log)
        names = ("NCCL_DEBUG", "NCCL_P2P_DISABLE", "NCCL_SOCKET_IFNAME", "MASTER_ADDR", "MASTER_PORT")
        for host, right in (
            ("gpu-a", ["WARN", "0", "eth1", LOOPBACK, "29501"]),
            ("gpu-b", ["INFO", "", "ib0", LOOPBACK, "29501"]),
        ):
            environ = environ_in(folder / f"env.{host}.0")
            self.assertEqual([environ[name] for name in names], right)
            self.assertNotIn("TORCHELASTIC_USE_AGENT_STORE", environ)

    def test_no_rank_finds_the_token_in_what_agent_and_controller_were_started_with(self) -> None:
        controller = self.start("--target-ranks", "1", environ={"FLODL_JOIN_TOKEN": TOKEN})
        self.assertNotIn(TOKEN.encode(), Path(f"/proc/{controller.pid}/environ").read_bytes())
        program = (*SH, 'tr "\\0" "\\n" </proc/$PPID/environ')
        environ = {"FLODL_JOIN_TOKEN": TOKEN, "MINE": "kept"}
        agent = self.join(controller.port, "gpu-a", program=program, environ=environ)
        self.assertEqual(agent.ended(), 0, agent.err)
        self.assertIn(b"MINE=kept", agent.out)
        self.assertIn(b"FLODL_JOIN_TOKEN=xxxx", agent.out)
        self.assertNotIn(TOKEN.encode(), agent.out)

    def test_a_launcher_without_our_object_gives_flodls_variables_alone_and_its_ranks_their_final_numbers(self) -> None:
        folder = self.folder()
        launcher = self.launcher()
        words = (*SH, f"{TELL[2]}; echo here", "sh", str(folder))
        agent = self.join(
            launcher.port, "gpu-a", "--nproc", "2", program=words, environ={**STALE, **KEPT, "OMP_NUM_THREADS": "3"}
        )
        host = launcher.host()
        self.assertEqual((host.hello.host, host.hello.local_devices, host.hello.gpus), ("gpu-a", b"\0\1", ()))
        self.assertEqual(host.hello.libtorch, "cpu")
        host.accept(8, 9)
        host.form([2, 3], 4, unknown={"kept": True})
        # The launcher's own numbers, those of the Accept, name a rank on the link.
        self.assertEqual(sorted(host.rest(), key=str), [RankExited(8, 0), RankExited(9, 0)])
        self.assertEqual(agent.ended(), 0)
        for index in (0, 1):
            environ, envelope = self.told(folder, "gpu-a", index)
            self.assertEqual(environ, {**BASE, **KEPT, "OMP_NUM_THREADS": "3", **flodls(index, "gpu-a", "-1")})
            self.assertEqual(envelope["controller"], {"host": LOOPBACK, "port": launcher.port})
            self.assertEqual((envelope["worker"]["ranks"], envelope["unknown"]), ([2, 3], {"kept": True}))
        self.assertEqual(len(agent.lines("the controller is flodl's own")), 1)
        self.assertEqual(sorted(agent.out.splitlines()), [b"[gpu-a:r2] here", b"[gpu-a:r3] here"])

    def test_a_rank_starts_with_no_signal_blocked_or_ignored_and_no_descriptor_but_its_own_three(self) -> None:
        launcher = self.launcher()
        program = (*SH, "grep -E '^Sig(Blk|Ign)' /proc/self/status; exec ls /proc/self/fd")
        agent = self.join(launcher.port, "gpu-a", program=program)
        host = launcher.host()
        host.run()
        host.rest()
        self.assertEqual(agent.ended(), 0)
        shown = [line.removeprefix(b"[gpu-a:r0] ") for line in agent.out.splitlines()]
        blocked, ignored = (int(line.split()[1], 16) & ORDINARY for line in shown[:2])
        # ls itself has its folder open as 3.
        self.assertEqual((blocked, ignored, shown[2:]), (0, 0, [b"0", b"1", b"2", b"3"]), agent.out)


# Tells its environment, when it was started and its pid.  The relay goes on until it is ended, a rank until a file is
# there.  usage: FOLDER
RELAYED = """
import os, sys, time
kind = "relay" if "FLODL_INTERNAL_RELAY_JSON" in os.environ else "rank"
begun = open("/proc/self/stat").read().rpartition(")")[2].split()[19]
path = f"{sys.argv[1]}/{kind}"
for name, data in ((".begun", f"{begun} {os.getpid()}".encode()), ("", open("/proc/self/environ", "rb").read())):
    with open(path + ".part", "wb") as file:
        file.write(data)
    os.rename(path + ".part", path + name)
while kind == "relay" or not os.path.exists(sys.argv[1] + "/release"):
    time.sleep(0.02)
"""
SPEC = {"host": "x", "controller_host": "192.0.2.1", "controller_port": 1, "ranks": [0], "salt_hex": SALT.hex()}


class Relayed:
    """A host with a relay and a rank, which run."""

    def __init__(self, launcher: Launcher, host: str) -> None:
        self._made = tempfile.TemporaryDirectory(prefix="flodl-tw-")
        self.folder = Path(self._made.name)
        words = ("join", f"{LOOPBACK}:{launcher.port}", "--host", host, "--nproc", "1", "--stop-grace", "600")
        self.agent = Command(*words, "--", *PYTHON, RELAYED, self._made.name, environ=STALE)
        self.link = launcher.host()
        self.link.accept(0)
        self.link.form([0], 1, relay=SPEC)
        for kind in ("relay", "rank"):
            until((self.folder / kind).exists, f"the {kind}", PATIENCE)

    def begun(self, kind: str) -> tuple[int, int]:
        """When one of the two was started, and its pid."""
        ticks, pid = (self.folder / f"{kind}.begun").read_text().split()
        return int(ticks), int(pid)

    def close(self) -> None:
        """Leave nothing of it behind."""
        self.agent.close()
        self._made.cleanup()


class Slow:
    """What takes seconds by its nature, begun at once."""

    def __init__(self) -> None:
        self.launcher = Launcher()
        self.relayed = Relayed(self.launcher, "relayed")
        (self.relayed.folder / "release").touch()
        address = f"{LOOPBACK}:{self.launcher.port}"
        one = ("--nproc", "1")
        self.persistent = Command("join", address, *one, "--persist", "--", *SH, "exit 2")
        self.link = self.launcher.host()
        self.link.run()
        self.alone = Command(
            "join", f"{LOOPBACK}:{free_port()}", *one, "--", "true", environ={"FLODL_NET_TIMEOUT_SCALE": "0.1"}
        )

    def close(self) -> None:
        """Leave nothing of it behind."""
        for each in (self.alone, self.persistent, self.relayed, self.launcher):
            each.close()


class SlowOnes(AgentTestCase):
    """Waits that are part of the promise; they run side by side."""

    def setUp(self) -> None:
        self.slow = shared(self, Slow)

    def test_the_relay_starts_first_with_its_role_alone_and_is_ended_after_the_last_rank(self) -> None:
        relayed, port = self.slow.relayed, self.slow.launcher.port
        self.assertLess(relayed.begun("relay"), relayed.begun("rank"))
        environ = environ_in(relayed.folder / "relay")
        spec = unhexed(environ.pop("FLODL_INTERNAL_RELAY_JSON"))
        self.assertEqual(environ, {**BASE, "FLODL_HOST_NAME": "relayed"})
        self.assertEqual(spec, {**SPEC, "controller_host": LOOPBACK, "controller_port": port})
        rank = environ_in(relayed.folder / "rank")
        self.assertNotIn("FLODL_INTERNAL_RELAY_JSON", rank)
        self.assertEqual(rank["FLODL_INTERNAL_LOCAL_RANK"], "0")
        # The relay's own exit is nobody's rank.
        self.assertEqual(relayed.link.rest(), [RankExited(0, 0)])
        self.assertEqual(relayed.agent.ended(), 0, relayed.agent.err)
        self.assertFalse(alive(relayed.begun("relay")[1]))

    def test_persist_dials_again_after_a_ranks_own_2_and_stops_at_ours(self) -> None:
        agent = self.slow.persistent
        self.assertEqual(self.slow.link.rest(), [RankExited(0, 2)])
        agent.said("dialing again in 5 s (--persist)")
        self.slow.launcher.host().reject("dataset-mismatch: another one")
        self.assertEqual(agent.ended(), 2, agent.err)
        self.assertGreaterEqual(agent.elapsed, 5.0)

    def test_nothing_that_listens_gives_1_after_the_scaled_attempts_with_one_line_on_the_reason(self) -> None:
        agent = self.slow.alone
        self.assertEqual(agent.ended(), 1)
        first, last = agent.err.splitlines()
        self.assertIn("does not answer yet (127.0.0.1: connection refused); trying up to 6 times", first)
        self.assertIn("did not answer in 6 attempts", last)
        self.assertTrue(last.endswith("(status 1)"), last)


WAITS = (*SH, 'trap "exit 0" TERM INT; echo begun; while :; do sleep 0.05; done')
"""A rank that goes on until SIGTERM or SIGINT, and ends with 0 then."""


class ExitStatus(AgentTestCase):
    """The agent's status; agents of one test run side by side."""

    def test_the_status_is_0_or_the_first_failing_ranks_own(self) -> None:
        launcher = self.launcher()
        programs = {
            "clean": (0, "exit 0", 0),
            "three": (3, "exit 3", 3),
            "two": (2, "exit 2", 2),
            "segv": (139, "kill -SEGV $$", -11),
        }
        agents = {name: self.join(launcher.port, name, program=(*SH, text)) for name, (_, text, _) in programs.items()}
        links = launcher.hosts(len(agents))
        for link in links.values():
            link.run()
        for name, (status, _, code) in programs.items():
            with self.subTest(name):
                self.assertEqual(links[name].rest(), [RankExited(0, code)])
                self.assertEqual(agents[name].ended(), status, agents[name].err)

    def test_the_first_of_two_failing_ranks_decides(self) -> None:
        launcher = self.launcher()
        folder = self.folder()
        text = (
            'if [ "$FLODL_INTERNAL_LOCAL_RANK" = 1 ]; then touch "$1/first"; exit 5; fi; '
            'while ! [ -e "$1/second" ]; do sleep 0.02; done; exit 6'
        )
        agent = self.join(launcher.port, "gpu-a", "--nproc", "2", program=(*SH, text, "sh", str(folder)))
        link = launcher.host()
        link.run(2)
        self.assertEqual(link.next(), RankExited(1, 5))
        # It stays up: ending the others is the controller's decision.
        self.assertIsNone(agent.process.poll())
        (folder / "second").touch()
        self.assertEqual(link.rest(), [RankExited(0, 6)])
        self.assertEqual(agent.ended(), 5)

    def test_what_the_controller_says_or_does_gives_1_and_ranks_get_sigterm(self) -> None:
        launcher = self.launcher()
        names = ("abort", "early-abort", "link", "early-link", "foreign", "window", "reject")
        agents = {name: self.join(launcher.port, name, program=WAITS) for name in names}
        links = launcher.hosts(len(names))
        links["window"].reject("window-closed: no join window is open")
        links["reject"].reject("come back on monday")
        for name in ("abort", "link"):
            links[name].run()
        for name in ("early-abort", "early-link"):
            links[name].accept(0)
        links["early-abort"].abort("not today")
        links["early-link"].close()
        links["foreign"].socket.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(64))
        for name in ("abort", "link"):
            agents[name].printed(b"[%s:r0] begun\n" % name.encode())
        links["abort"].abort("enough")
        links["link"].close()
        self.assertEqual(links["abort"].rest(), [])
        for name, text in (
            ("abort", "the run was aborted: enough"),
            ("early-abort", "the run was aborted: not today"),
            ("link", "the link to the controller has ended"),
            ("early-link", "ended the link before the world formed"),
            ("foreign", "does not answer as a controller does"),
            ("window", "window-closed: no join window is open"),
            ("reject", "come back on monday"),
        ):
            with self.subTest(name):
                self.assertEqual(agents[name].ended(), 1, agents[name].err)
                self.assertIn(text, agents[name].err)

    def test_a_signal_gives_128_and_its_number_at_every_stage(self) -> None:
        launcher = self.launcher()
        stages = (("greeting", 15), ("waiting", 2), ("running", 15), ("running", 2))
        signals = {f"{stage}-{number}": (stage, number) for stage, number in stages}
        agents = {name: self.join(launcher.port, name, program=WAITS) for name in signals}
        links = launcher.hosts(len(agents))
        for name, (stage, _) in signals.items():
            if stage == "running":
                links[name].run()
                agents[name].printed(b"begun")
            elif stage == "waiting":
                links[name].accept(0)
                agents[name].said("waiting for the world")
        for name, (_, number) in signals.items():
            agents[name].send_signal(number)
        for name, (_, number) in signals.items():
            with self.subTest(name):
                self.assertEqual(agents[name].ended(), 128 + number, agents[name].err)
                self.assertEqual(links[name].rest(), [])

    def test_what_no_retry_fixes_gives_2_before_anybody_is_dialed(self) -> None:
        launcher = self.launcher()
        folder = self.folder()
        plain = folder / "plain"
        plain.write_text("no program")
        open_file = folder / "open"
        open_file.write_text(TOKEN)
        open_file.chmod(0o644)
        nothing = {"PATH": str(folder)}
        one = ("--nproc", "1")
        table: dict[str, tuple[tuple[str, ...], tuple[str, ...], dict[str, str], str]] = {
            "no-devices": ((), ("/bin/true",), nothing, "--nproc N for ranks without GPUs"),
            "grace": ((*one, "--stop-grace", "soon"), ("true",), {}, "--stop-grace 'soon'"),
            "signature": ((*one, "--dataset-sig", "ab"), ("true",), {}, "--dataset-sig 'ab'"),
            "readable": ((*one, "--token-file", str(open_file)), ("true",), {}, "--token-file"),
            "token": (one, ("true",), {"FLODL_JOIN_TOKEN": TOKEN[:-1]}, "FLODL_JOIN_TOKEN"),
            "argument": ((*one, "--token", TOKEN), ("true",), {}, "every user of this machine can see an argument"),
            "absent": (one, ("no-such-program",), {}, "PROGRAM 'no-such-program': it is not on PATH"),
            "plain": (one, (str(plain),), {}, "it cannot be executed"),
            "none": (one, (), {}, "PROGRAM"),
        }
        address = f"{LOOPBACK}:{launcher.port}"
        agents = {
            name: self.command("join", address, *words, "--", *program, environ=environ)
            for name, (words, program, environ, _) in table.items()
        }
        agents["nowhere"] = self.command("join", "nowhere:99999", *one, "--", "true")
        for name, agent in agents.items():
            with self.subTest(name):
                self.assertEqual(agent.ended(), 2, agent.err)
                self.assertIn(table[name][3] if name in table else "nowhere:99999", agent.err)
                self.assertNotIn(TOKEN[:-1], agent.err)
                self.assertEqual(agent.out, b"")
        self.assertFalse(launcher.dialed())

    def test_the_death_of_the_relay_with_ranks_running_ends_the_host_with_1(self) -> None:
        relayed = Relayed(self.launcher(), "gpu-a")
        self.addCleanup(relayed.close)
        os.kill(relayed.begun("relay")[1], signal.SIGKILL)
        self.assertEqual(relayed.link.rest(), [RankExited(0, -signal.SIGTERM)])
        self.assertEqual(relayed.agent.ended(), 1, relayed.agent.err)
        self.assertIn("the relay exited with code -9 (killed by SIGKILL) while ranks run", relayed.agent.err)


class RealController(AgentTestCase):
    """The same against a real controller, in its own words."""

    def test_a_host_that_is_told_to_end_is_named_with_the_signal(self) -> None:
        controller = self.start("--target-ranks", "2", "--after-run", "hold")
        program = (*SH, "echo begun; exec sleep 600")
        agent, other = (self.join(controller.port, name, program=program) for name in ("gpu-a", "gpu-b"))
        for each in (agent, other):
            each.printed(b"begun\n")
        agent.send_signal(signal.SIGINT)
        self.assertEqual((agent.ended(), other.ended()), (130, 1))
        reason = re.compile(
            r"rank [01] of host 'gpu-a' exited with code -2 [(]killed by SIGINT[)] "
            r"[(]stopped: flodl-tw on its host got SIGINT[)]"
        )
        until(lambda: reason.search(controller.log), "the reason")
        self.assertRegex(other.err, reason)
        self.assertNotIn("left an exception", agent.err)

    def test_its_words_give_1_or_2_and_a_token_that_is_wrong_or_missing_2(self) -> None:
        closed = self.launch("--target-ranks", "1", "--after-run", "hold")
        signed = self.launch("--min-rank-start", "9", "--dataset-sig", "ab" * 32)
        guarded = self.launch("--min-rank-start", "9", environ={"FLODL_JOIN_TOKEN": TOKEN})
        self.assertEqual(self.join(closed.listening().port, "gpu-a").ended(), 0)
        for controller in (signed, guarded):
            controller.listening()
        wrong = {"FLODL_JOIN_TOKEN": "f" * 32}
        agents = {
            "window-closed: ": (1, self.join(closed.port, "late")),
            "dataset-mismatch: ": (2, self.join(signed.port, "unsigned")),
            "most likely the token is not this run's": (2, self.join(guarded.port, "wrong", environ=wrong)),
            "most likely the run wants a token, and none was given": (2, self.join(guarded.port, "none")),
            "or the run wants none": (2, self.join(signed.port, "needless", environ=wrong)),
        }
        for text, (status, agent) in agents.items():
            with self.subTest(text):
                self.assertEqual(agent.ended(), status, agent.err)
                (line,) = agent.lines(text)
                self.assertTrue(line.endswith(f"(status {status})"), line)
                self.assertNotIn("f" * 32, agent.err)
        for text in list(agents)[2:]:
            self.assertEqual(len(agents[text][1].lines("closed the hello without a reply; trying again")), 2)
        self.assertEqual((signed.state()["joined_hosts"], guarded.state()["joined_hosts"]), (0, 0))

    def test_an_exit_by_a_signal_is_in_its_log_though_a_grandchild_holds_the_output_open(self) -> None:
        controller = self.start("--target-ranks", "2")
        text = (
            '[ "$RANK" = 0 ] && exec sleep 600\n'
            '(trap "" TERM; touch "$1/held"; exec sleep 600) &\n'
            'while ! [ -e "$1/held" ]; do sleep 0.02; done; kill -SEGV $$'
        )
        folder = self.folder()
        agent = self.join(
            controller.port, "gpu-a", "--nproc", "2", "--stop-grace", "600", program=(*SH, text, "sh", str(folder))
        )
        agent.said("rank 1 exited with code -11 (killed by SIGSEGV)")
        line = controller.said("code -11 (killed by SIGSEGV)")
        for part in ("gpu-a", "rank 1"):
            self.assertIn(part, line)
        # The grandchild ignores SIGTERM, and so the agent waits for it, and would for ten minutes.
        self.assertIsNone(agent.process.poll())
        agent.said("rank 0 exited")
        agent.send_signal(signal.SIGTERM)
        agent.said("SIGTERM came, too")
        time.sleep(2 * SAME_SECS)
        agent.send_signal(signal.SIGTERM)
        self.assertEqual(agent.ended(), 139, agent.err)
        self.assertEqual(controller.ended(), 1)


FDL_YML = """\
commands:
  train: {{run: cargo run --release}}
join:
  controller: 127.0.0.1:{port}
  token: {token}
  host: gpu-a
  devices: [0, 1]
  data_path: /data
  args: [-c, '{text}', sh, "{folder}"]
"""


class ToldByFiles(AgentTestCase):
    """A token's file and a flodl user's file, in place of options."""

    def test_a_join_block_has_all_but_the_program_and_its_token_goes_no_further(self) -> None:
        folder = self.folder()
        controller = self.start(
            "--target-ranks", "2", "--after-run", "hold", "--store", "off", environ={"FLODL_JOIN_TOKEN": TOKEN}
        )
        path = folder / "fdl.yml"
        path.write_text(FDL_YML.format(port=controller.port, token=TOKEN, text=TELL[2], folder=folder))
        path.chmod(0o644)
        # Ranks without GPUs are asked for, so the file's devices are not.
        agent = self.command("join", "--nproc", "2", "--", "sh", environ={"FLODL_TW_FDL_YML": str(path)})
        self.assertEqual(agent.ended(), 0, agent.err)
        controller.state_is(phase="done", joined_hosts=1)
        self.assertEqual(len(agent.lines("others can read the token in it; chmod 600 it, or use --token-file")), 1)
        for index in (0, 1):
            environ = environ_in(folder / f"env.gpu-a.{index}")
            worker = unhexed(environ["FLODL_INTERNAL_CLUSTER_JSON"])["worker"]
            self.assertEqual((environ["RANK"], worker["host"], worker["data_path"]), (str(index), "gpu-a", "/data"))
            self.assertEqual([name for name in environ if name.startswith("FLODL_TW_")], ["FLODL_TW_RANK0_ADDR"])
            self.assertNotIn(TOKEN, str(environ) + bytes.fromhex(environ["FLODL_INTERNAL_CLUSTER_JSON"]).decode())
        self.assertNotIn(TOKEN, agent.err + controller.log)

    def test_yaml_is_imported_for_such_a_file_alone(self) -> None:
        path = self.folder() / "fdl.yml"
        path.write_text("join: {controller: 'nowhere:0'}")
        text = "import sys; from flodl_tw.cli.main import main; main(sys.argv[1:]); print('yaml' in sys.modules)"
        for words, imported in (((), b"False"), (("--fdl-yml", str(path)), b"True")):
            with self.subTest(imported):
                ended = subprocess.run(
                    [sys.executable, "-c", text, "join", *words, "--nproc", "1", "--", "true"],
                    capture_output=True,
                    env=BASE,
                    timeout=PATIENCE,
                )
                self.assertEqual(ended.stdout.strip(), imported, ended.stderr)

    def test_a_token_that_was_made_lets_its_copies_in_and_no_other(self) -> None:
        folder = self.folder()
        path, other = folder / "run.token", folder / "other.token"
        for each in (path, other):
            made = self.command("token", str(each))
            self.assertEqual(made.ended(), 0, made.err)
            for text in (made.out.decode(), made.err):
                self.assertNotIn(each.read_text().strip(), text)
        again = self.command("token", str(path))
        self.assertEqual(again.ended(), 2, again.err)
        self.assertIn("it is there already, and is left as it is", again.err)
        controller = self.start("--target-ranks", "1", "--token-file", str(path))
        wrong = self.join(controller.port, "gpu-b", "--token-file", str(other))
        self.assertEqual(wrong.ended(), 2, wrong.err)
        self.assertEqual(self.join(controller.port, "gpu-a", "--token-file", str(path)).ended(), 0)
        self.assertEqual(controller.ended(), 0)


class LaunchedAgent(AgentTestCase):
    """``flodl-tw-agent``: what ``fdl join --bin`` starts."""

    def test_it_does_what_the_bootstrap_says_and_its_ranks_do_not_see_it(self) -> None:
        folder = self.folder()
        controller = self.start("--target-ranks", "2", "--after-run", "hold", environ={"FLODL_JOIN_TOKEN": TOKEN})
        orders = {
            "host": "gpu-z",
            "controller_host": LOOPBACK,
            "controller_port": controller.port,
            "salt_hex": TOKEN,
            "local_devices": [4, 6],
            "libtorch": "precompiled/cu128",
            "data_path": "/data",
        }
        agent = self.command(
            *(*TELL, "sh", str(folder)), environ={"FLODL_INTERNAL_AGENT_JSON": hexed(orders)}, name="flodl-tw-agent"
        )
        self.assertEqual(agent.ended(), 0, agent.err)
        controller.state_is(phase="done")
        (member,) = controller.state()["members"]
        self.assertEqual(
            (member["host"], member["local_devices"], member["libtorch"]), ("gpu-z", [4, 6], "precompiled/cu128")
        )
        for index, mask in enumerate(("4", "6")):
            environ = environ_in(folder / f"env.gpu-z.{index}")
            envelope = unhexed(environ["FLODL_INTERNAL_CLUSTER_JSON"])
            self.assertEqual((environ["CUDA_VISIBLE_DEVICES"], environ["HIP_VISIBLE_DEVICES"]), (mask, mask))
            self.assertNotIn("FLODL_INTERNAL_AGENT_JSON", environ)
            self.assertEqual(envelope["worker"]["data_path"], "/data")
            self.assertNotIn(TOKEN, str(environ) + str(envelope))

    def test_asked_for_a_model_signature_it_becomes_the_program_with_an_ordinary_start(self) -> None:
        probe = {"FLODL_INTERNAL_MODEL_SIG_PROBE": "1"}
        text = 'echo "$$ $1 $FLODL_INTERNAL_MODEL_SIG_PROBE"; grep SigIgn /proc/$$/status; exit 7'
        agent = self.command(*SH, text, "sh", "--flag", environ=probe, name="flodl-tw-agent")
        neither = self.command("true", name="flodl-tw-agent")
        garbled = self.command("true", environ={"FLODL_INTERNAL_AGENT_JSON": TOKEN}, name="flodl-tw-agent")
        self.assertEqual(agent.ended(), 7)
        self.assertEqual(agent.err, "")
        said, ignored = agent.out.splitlines()
        self.assertEqual(said, b"%d --flag 1" % agent.pid)
        self.assertEqual(int(ignored.split()[1], 16) & ORDINARY, 0)
        self.assertEqual(neither.ended(), 2)
        self.assertIn("FLODL_INTERNAL_AGENT_JSON", neither.err)
        self.assertEqual(garbled.ended(), 2)
        self.assertNotIn(TOKEN, garbled.err)
