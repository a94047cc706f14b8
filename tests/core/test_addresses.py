"""Addresses: the spec's private ranges at their edges, IPv4 inside IPv6, and how each is shown."""

from __future__ import annotations

import unittest

from flodl_tw.core.addresses import DEFAULT_PORT, Address, classify, parse_backend, parse_endpoint, show_endpoint

# as a socket names it, shown, loopback, private
ADDRESSES = (
    ("126.255.255.255", "126.255.255.255", False, False),
    ("127.0.0.0", "127.0.0.0", True, True),
    ("127.0.0.1", "127.0.0.1", True, True),
    ("127.255.255.255", "127.255.255.255", True, True),
    ("128.0.0.0", "128.0.0.0", False, False),
    ("9.255.255.255", "9.255.255.255", False, False),
    ("10.0.0.0", "10.0.0.0", False, True),
    ("10.255.255.255", "10.255.255.255", False, True),
    ("11.0.0.0", "11.0.0.0", False, False),
    ("172.15.255.255", "172.15.255.255", False, False),
    ("172.16.0.0", "172.16.0.0", False, True),
    ("172.31.255.255", "172.31.255.255", False, True),
    ("172.32.0.0", "172.32.0.0", False, False),
    ("192.167.255.255", "192.167.255.255", False, False),
    ("192.168.0.0", "192.168.0.0", False, True),
    ("192.168.255.255", "192.168.255.255", False, True),
    ("192.169.0.0", "192.169.0.0", False, False),
    ("169.253.255.255", "169.253.255.255", False, False),
    ("169.254.0.0", "169.254.0.0", False, True),
    ("169.254.255.255", "169.254.255.255", False, True),
    ("169.255.0.0", "169.255.0.0", False, False),
    ("100.63.255.255", "100.63.255.255", False, False),
    ("100.64.0.0", "100.64.0.0", False, True),
    ("100.127.255.255", "100.127.255.255", False, True),
    ("100.128.0.0", "100.128.0.0", False, False),
    ("0.0.0.0", "0.0.0.0", False, False),
    ("192.0.2.1", "192.0.2.1", False, False),
    ("198.18.0.1", "198.18.0.1", False, False),
    ("255.255.255.255", "255.255.255.255", False, False),
    ("8.8.8.8", "8.8.8.8", False, False),
    ("::", "::", False, False),
    ("::1", "::1", True, True),
    ("0:0:0:0:0:0:0:1", "::1", True, True),
    ("::2", "::2", False, False),
    ("fe7f:ffff::", "fe7f:ffff::", False, False),
    ("fe80::", "fe80::", False, True),
    ("fe80::1%eth0", "fe80::1%eth0", False, True),
    ("febf:ffff::1", "febf:ffff::1", False, True),
    ("fec0::", "fec0::", False, False),
    ("fbff::", "fbff::", False, False),
    ("fc00::", "fc00::", False, True),
    ("fdff:ffff::1", "fdff:ffff::1", False, True),
    ("fe00::", "fe00::", False, False),
    ("2001:db8::1", "2001:db8::1", False, False),
    ("2001:DB8:0::1", "2001:db8::1", False, False),
    ("2606:4700::1111", "2606:4700::1111", False, False),
    ("::ffff:127.0.0.1", "127.0.0.1", True, True),
    ("::ffff:7f00:1", "127.0.0.1", True, True),
    ("::ffff:10.1.2.3", "10.1.2.3", False, True),
    ("::ffff:100.64.0.1", "100.64.0.1", False, True),
    ("::ffff:8.8.8.8", "8.8.8.8", False, False),
    ("::127.0.0.1", "::7f00:1", False, False),
)
NO_ADDRESS = ("", "localhost", "gpu-a", "127.1", "10.0.0.256", "1.2.3.4:80", "[::1]", ":::", "010.0.0.1")
ENDPOINTS = (
    ("10.0.0.1", 29500, "10.0.0.1:29500"),
    ("gpu-a", 0, "gpu-a:0"),
    ("::1", 29500, "[::1]:29500"),
    ("fe80::1%eth0", 1, "[fe80::1%eth0]:1"),
)
BACKENDS = (
    ("tcp:10.0.0.9:7001", ("10.0.0.9", 7001)),
    ("tcp:gpu-a:1", ("gpu-a", 1)),
    ("tcp:[fd00::1]:7001", ("fd00::1", 7001)),
    (r"tcp:fd00\:\:1:65535", ("fd00::1", 65535)),
    ("unix:/run/c.sock", "/run/c.sock"),
    ("unix:" + "x" * 107, "x" * 107),
)
NO_BACKENDS = (
    ("", "neither tcp nor unix"),
    ("off", "neither tcp nor unix"),
    ("tls:a:1", "neither tcp nor unix"),
    ("tcp:", "'' names no host"),
    ("tcp:a", "'a' has no port"),
    ("tcp:a:", "'a:' has the port '', the limits are 1 and 65535"),
    ("tcp:a:-1", "'a:-1' has the port '-1', the limits are 1 and 65535"),
    ("tcp:a:0", "'a:0' has the port '0', the limits are 1 and 65535"),
    ("tcp::5", "':5' names no host"),
    ("tcp:a b:5", "'a b:5' names no host"),
    ("unix:", "its path has 0 bytes"),
    ("unix:a\0b", "no NUL"),
    ("unix:" + "x" * 108, "its path has 108 bytes, the limits are 1 and 107"),
)


class TestAddresses(unittest.TestCase):
    """How a peer's address is judged and shown."""

    def test_each_address_is_judged_by_the_spec_s_ranges(self) -> None:
        for host, shown, loopback, private in ADDRESSES:
            with self.subTest(host):
                self.assertEqual(classify(host), Address(shown, loopback, private))

    def test_what_is_no_numeric_address_is_refused(self) -> None:
        for host in NO_ADDRESS:
            with self.subTest(host), self.assertRaises(ValueError):
                classify(host)

    def test_an_endpoint_brackets_ipv6(self) -> None:
        for host, port, shown in ENDPOINTS:
            with self.subTest(host):
                self.assertEqual(show_endpoint(host, port), shown)


GIVEN_ENDPOINTS = (
    ("gpu-a", ("gpu-a", DEFAULT_PORT)),
    ("gpu-a:1", ("gpu-a", 1)),
    ("gpu-a.example.:65535", ("gpu-a.example.", 65535)),
    ("10.0.0.1:29500", ("10.0.0.1", 29500)),
    ("10.0.0.1:00080", ("10.0.0.1", 80)),
    ("::1", ("::1", DEFAULT_PORT)),
    ("2001:db8::1:2950", ("2001:db8::1:2950", DEFAULT_PORT)),
    ("[::1]", ("::1", DEFAULT_PORT)),
    ("[::1]:1", ("::1", 1)),
    ("[fe80::1%eth0]:1", ("fe80::1%eth0", 1)),
    ("bücher.example:1", ("bücher.example", 1)),
    ("a" * 253 + ":1", ("a" * 253, 1)),
    # What a browser or curl was told is pasted.
    ("http://127.0.0.1:29500/", ("127.0.0.1", 29500)),
    ("HTTP://gpu-a:1/state.json?x#y", ("gpu-a", 1)),
    ("http://[fd00::1]:1", ("fd00::1", 1)),
    ("http://127.0.0.1/", ("127.0.0.1", 80)),
)
NO_ENDPOINT = (
    ("", "'' names no host: write HOST or HOST:PORT"),
    (":29500", "':29500' names no host: write HOST or HOST:PORT"),
    ("10.0.0.1:29500:", "'10.0.0.1:29500:' has several colons and is no IPv6 address: write HOST or HOST:PORT"),
    ("2001:db8::1:29500", "'2001:db8::1:29500' has several colons and is no IPv6 address: write HOST or HOST:PORT"),
    ("[]:1", "'[]:1' names no host: write HOST or HOST:PORT"),
    ("gpu a:1", "'gpu a:1' names no host: write HOST or HOST:PORT"),
    ("gpu-a\n:1", "'gpu-a\\n:1' names no host: write HOST or HOST:PORT"),
    ("gpu\u2003a:1", "'gpu\\u2003a:1' names no host: write HOST or HOST:PORT"),
    ("https://gpu-a:1", "'https://gpu-a:1' is a URL of another kind than http://: write HOST:PORT"),
    ("tcp://gpu-a:1", "'tcp://gpu-a:1' is a URL of another kind than http://: write HOST:PORT"),
    ("http://", "'http://' names no host: write HOST or HOST:PORT"),
    ("http://gpu-a:x/", "'http://gpu-a:x/' has the port 'x', the limits are 1 and 65535: write HOST:PORT"),
    ("gpu-a/x", "'gpu-a/x' names no host: write HOST or HOST:PORT"),
    ("a" * 254, f"{'a' * 254!r} names no host: write HOST or HOST:PORT"),
    ("[::1:1", "'[::1:1' has no ] after its address: write [ADDRESS]:PORT"),
    ("[::1]29545", "'[::1]29545' has no : between its ] and its port: write [ADDRESS]:PORT"),
    ("gpu-a:", "'gpu-a:' has the port '', the limits are 1 and 65535: write HOST:PORT"),
    ("gpu-a:0", "'gpu-a:0' has the port '0', the limits are 1 and 65535: write HOST:PORT"),
    ("gpu-a:65536", "'gpu-a:65536' has the port '65536', the limits are 1 and 65535: write HOST:PORT"),
    ("gpu-a:-1", "'gpu-a:-1' has the port '-1', the limits are 1 and 65535: write HOST:PORT"),
    ("gpu-a:1.0", "'gpu-a:1.0' has the port '1.0', the limits are 1 and 65535: write HOST:PORT"),
    ("gpu-a:１", "'gpu-a:１' has the port '１', the limits are 1 and 65535: write HOST:PORT"),
    ("gpu-a:000080", "'gpu-a:000080' has the port '000080', the limits are 1 and 65535: write HOST:PORT"),
    ("[::1]:", "'[::1]:' has the port '', the limits are 1 and 65535: write HOST:PORT"),
    ("[::1]:x", "'[::1]:x' has the port 'x', the limits are 1 and 65535: write HOST:PORT"),
)


class TestGivenEndpoints(unittest.TestCase):
    """How a person names a controller."""

    def test_a_host_may_come_with_a_port(self) -> None:
        for text, right in GIVEN_ENDPOINTS:
            with self.subTest(text):
                self.assertEqual(parse_endpoint(text), right)

    def test_the_default_port_may_be_another(self) -> None:
        self.assertEqual(parse_endpoint("gpu-a", 1337), ("gpu-a", 1337))
        self.assertEqual(parse_endpoint("gpu-a:1", 1337), ("gpu-a", 1))

    def test_what_names_no_endpoint_is_refused_with_what_is_wrong(self) -> None:
        for text, error in NO_ENDPOINT:
            with self.subTest(text), self.assertRaises(ValueError) as caught:
                parse_endpoint(text)
            self.assertEqual(str(caught.exception), error)

    def test_what_is_shown_is_read_again(self) -> None:
        for host, port, shown in ENDPOINTS:
            if port:
                with self.subTest(host):
                    self.assertEqual(parse_endpoint(shown), (host, port))

    def test_a_backend_is_a_path_or_a_host_and_a_port(self) -> None:
        for text, backend in BACKENDS:
            with self.subTest(text):
                self.assertEqual(parse_backend(text), backend)

    def test_what_names_no_backend_is_refused_with_the_reason(self) -> None:
        for text, reason in NO_BACKENDS:
            with self.subTest(text), self.assertRaises(ValueError) as caught:
                parse_backend(text)
            self.assertIn(reason, str(caught.exception), text)
