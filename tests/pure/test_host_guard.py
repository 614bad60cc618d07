"""Which Host and Origin headers may pass."""

from __future__ import annotations

import socket

import pytest

from app.host_guard import host_of, is_allowed_host, is_allowed_origin


@pytest.mark.parametrize(
    ("authority", "host"),
    [
        ("localhost", "localhost"),
        ("LocalHost:11435", "localhost"),
        ("localhost.:80", "localhost"),
        ("127.0.0.1:11435", "127.0.0.1"),
        ("[::1]:11435", "::1"),
        ("[::1", ""),
        ("", ""),
        (":80", ""),
        ("user@evil.example", "evil.example"),
    ],
)
def test_host_of(authority: str, host: str) -> None:
    assert host_of(authority) == host


@pytest.mark.parametrize(
    "authority",
    ["localhost:11435", "127.0.0.1", "[::1]:1", "192.168.1.5:80", "box.local", "a.localhost", socket.gethostname()],
)
def test_local_names_and_addresses_pass(authority: str) -> None:
    assert is_allowed_host(authority)


@pytest.mark.parametrize(
    "authority", ["", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "evillocal", "[::1"]
)
def test_foreign_names_do_not_pass(authority: str) -> None:
    assert not is_allowed_host(authority)


def test_configured_names_pass() -> None:
    assert is_allowed_host("Chat.Example:443", {"chat.example"})
    assert is_allowed_origin("https://chat.example", "127.0.0.1:11435", {"chat.example"})


@pytest.mark.parametrize("origin", ["http://localhost:3000", "http://127.0.0.1", "https://192.168.1.5:8443"])
def test_origins_of_this_machine_and_of_the_daemon_itself_pass(origin: str) -> None:
    assert is_allowed_origin(origin, "192.168.1.5:11435")


@pytest.mark.parametrize(
    "origin", ["null", "", "https://evil.example", "http://6.6.6.6", "http://[", "file://", "https://localhost.evil"]
)
def test_other_origins_do_not(origin: str) -> None:
    assert not is_allowed_origin(origin, "127.0.0.1:11435")
