"""What a launcher tells an agent: flodl's keys, and every other object refused in one line that shows none of it."""

from __future__ import annotations

import json
import sys
import unittest
from typing import Any

from flodl_tw.agent.settings import AgentSettings, read_agent_settings
from flodl_tw.core.errors import SettingError
from flodl_tw.fdl.launcher import Bootstrap, read_bootstrap
from flodl_tw.options import OptionReader

SALT = "00112233445566778899aabbccddeeff"
PLAIN: dict[str, Any] = {"host": "gpu-a", "controller_host": "10.0.0.100", "controller_port": 1337}
WAY_OUT = "start this program with fdl join --bin, or use flodl-tw join"
TEXT = "must be a text, in characters that UTF-8 has"
PORT = "its controller_port must be a whole number from 1 to 65535"
DEVICE = "its local_devices[0] must be a whole number from 0 to 255"
DEVICES = "its local_devices must be a list of whole numbers from 0 to 255"
WRONG: tuple[tuple[str, Any, str], ...] = (
    ("host", 1, f"its host {TEXT}"),
    ("host", ["gpu-a"], f"its host {TEXT}"),
    ("controller_host", None, f"its controller_host {TEXT}"),
    ("controller_host", True, f"its controller_host {TEXT}"),
    ("controller_port", None, PORT),
    ("controller_port", True, PORT),
    ("controller_port", "1337", PORT),
    ("controller_port", 1337.0, PORT),
    ("controller_port", 0, PORT),
    ("controller_port", -1, PORT),
    ("controller_port", 65536, PORT),
    ("local_devices", 0, DEVICES),
    ("local_devices", {"0": 1}, DEVICES),
    ("local_devices", [True], DEVICE),
    ("local_devices", [-1], DEVICE),
    ("local_devices", [256], DEVICE),
    ("local_devices", [0.0], DEVICE),
    ("gpu_ram_share", "0.5", "its gpu_ram_share must be a number"),
    ("gpu_ram_share", True, "its gpu_ram_share must be a number"),
    ("salt_hex", 5, f"its salt_hex {TEXT}"),
    ("libtorch", 5, f"its libtorch {TEXT}"),
    ("run_id", {}, f"its run_id {TEXT}"),
)
UNUSABLE: tuple[tuple[str, Any], ...] = (
    ("controller_port", 10**4000),
    ("local_devices", [10**400]),
    ("salt_hex", 10**31),
    ("controller_host", ""),
    ("controller_host", "gpu a"),
    ("controller_host", "http://gpu-a"),
    ("controller_host", "[::1]"),
    ("controller_host", "gpu-a]:1"),
    ("controller_host", "a\nb"),
    ("controller_host", "x" * 300),
    ("host", "\ud800"),
    ("run_id", "\udfff"),
    ("libtorch", "\ud800"),
    ("dataset_sig_hex", "ab"),
    ("model_sig_hex", "zz" * 32),
    ("gpu_ram_share", float("nan")),
    ("gpu_ram_share", float("inf")),
    ("gpu_ram_share", -0.5),
    ("gpu_ram_share", 0),
    ("gpu_ram_share", 1e300),
    ("gpu_ram_share", 10**400),
    ("salt_hex", SALT[:31]),
    ("salt_hex", SALT + "00"),
    ("salt_hex", "g" * 32),
)
NO_JSON = (
    b"",
    b"{",
    b"[" * 100_000,
    b'{"host":' * 50_000,
    b"\xff\xfe\x00",
    b'{"host":"\xff"}',
    b'{"controller_port":' + b"9" * 5000 + b"}",
    b"'x'",
)


def hexed(spec: object) -> str:
    """The object as a launcher gives it."""
    return json.dumps(spec).encode().hex()


def told(text: str) -> AgentSettings:
    """The settings that a bootstrap leads to."""
    orders = read_bootstrap(text)
    return read_agent_settings(OptionReader(orders.options, {}), [sys.executable], token=orders.token)[0]


class TestBootstrap(unittest.TestCase):
    """Orders of a launcher."""

    def test_every_key_of_flodl_s_is_an_option_or_more(self) -> None:
        spec = {
            "host": "gpu-a",
            "controller_host": "10.0.0.100",
            "controller_port": 1337,
            "salt_hex": SALT,
            "local_devices": [4, 0, 255],
            "libtorch": "precompiled/cu128",
            "dataset_sig_hex": "ab" * 32,
            "run_id": "night 7",
            "data_path": "/data",
            "gpu_ram_share": 0.5,
            "model_sig_hex": "cd" * 32,
            "of_a_later_release": [{}],
        }
        orders = read_bootstrap(hexed(spec))
        self.assertEqual(
            orders,
            Bootstrap(
                {
                    "host": "gpu-a",
                    "libtorch": "precompiled/cu128",
                    "dataset-sig": "ab" * 32,
                    "run-id": "night 7",
                    "data-path": "/data",
                    "model-sig": "cd" * 32,
                    "controller": "10.0.0.100:1337",
                    "gpu-ram-share": "0.5",
                },
                bytes.fromhex(SALT),
                (4, 0, 255),
            ),
        )
        settings = told(hexed(spec))
        self.assertEqual(settings.token, bytes.fromhex(SALT))
        self.assertEqual((settings.controller, settings.gpu_ram_share), (("10.0.0.100", 1337), 0.5))

    def test_what_is_absent_or_null_is_not_given(self) -> None:
        optional = ("salt_hex", "local_devices", "libtorch", "dataset_sig_hex", "run_id", "data_path", "gpu_ram_share")
        right = Bootstrap({"host": "gpu-a", "controller": "10.0.0.100:1337"})
        self.assertEqual(read_bootstrap(hexed(PLAIN)), right)
        self.assertEqual(read_bootstrap(hexed({**PLAIN, **dict.fromkeys(optional)})), right)
        self.assertEqual(read_bootstrap(hexed({**PLAIN, "salt_hex": "", "local_devices": []})), right)

    def test_an_ipv6_controller_is_read_again(self) -> None:
        self.assertEqual(told(hexed({**PLAIN, "controller_host": "fe80::1%eth0"})).controller, ("fe80::1%eth0", 1337))

    def test_a_share_of_memory_comes_through_as_it_is(self) -> None:
        for share in (0.1, 1 / 3, 1e-7, 5e-324, 0.00012345678901234567, 1, 1023.9999999999999, 1.0):
            with self.subTest(share):
                self.assertEqual(told(hexed({**PLAIN, "gpu_ram_share": share})).gpu_ram_share, share)

    def test_orders_do_not_show_the_token(self) -> None:
        orders = read_bootstrap(hexed({**PLAIN, "salt_hex": SALT}))
        self.assertNotIn(SALT, repr(orders))
        self.assertNotIn(repr(orders.token), repr(orders))


class TestHostileBootstraps(unittest.TestCase):
    """Objects that no launcher writes."""

    def refused(self, text: str) -> str:
        """The line for an object that cannot be used: one line, without the salt."""
        with self.assertRaises(SettingError) as caught:
            told(text)
        line = str(caught.exception)
        self.assertTrue(line.isprintable(), line)
        self.assertLess(len(line), 600)
        for length in range(8, len(SALT) + 1, 8):
            self.assertNotIn(SALT[:length], line)
        return line

    def test_a_value_of_another_type_or_out_of_range_is_named_by_its_key(self) -> None:
        for key, value, reason in WRONG:
            with self.subTest(key, value=str(value)[:20]):
                line = self.refused(hexed({**PLAIN, "salt_hex": SALT, key: value}))
                self.assertEqual(line, f"FLODL_INTERNAL_AGENT_JSON (not shown): {reason}; {WAY_OUT}")

    def test_a_value_that_no_option_takes_is_one_line_too(self) -> None:
        for key, value in UNUSABLE:
            with self.subTest(key, value=str(value)[:20]):
                self.refused(hexed({**PLAIN, "salt_hex": SALT, key: value}))

    def test_what_is_no_hex_of_a_json_object_is_refused(self) -> None:
        objects = (hexed(value) for value in ([], "x", 1, None, True, [PLAIN], SALT))
        for text in ("", "xyz", SALT[:31], json.dumps(PLAIN), "é", *objects, *(data.hex() for data in NO_JSON)):
            with self.subTest(text[:20]):
                right = f"FLODL_INTERNAL_AGENT_JSON (not shown): it is no hex of a JSON object; {WAY_OUT}"
                self.assertEqual(self.refused(text), right)
