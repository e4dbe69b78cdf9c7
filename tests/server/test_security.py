"""Access to a server: by the right token, a certificate, and from this machine only unless said otherwise."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.server.transport.grpc_channel import GrpcChannel
from lightning_hetpipe.server.transport.grpc_server import GrpcServer
from lightning_hetpipe.server.transport.interface import CallRefused, Unreachable
from lightning_hetpipe.server.transport.security import Security, is_loopback, split
from tests.server.transports import Desk, certificates, connect, security, serve


def test_what_is_none_comes_from_the_environment() -> None:
    environment = {"HETPIPE_CA": "a", "HETPIPE_CERTIFICATE": "b", "HETPIPE_KEY": "", "HETPIPE_TOKEN": "d"}
    assert Security(ca="mine").from_environment(environment) == Security("mine", "b", None, "d")


def test_the_token_is_not_shown() -> None:
    secret = Security(token="open-sesame")
    assert "sesame" not in repr(secret) + str(secret) + f"{secret}"


@pytest.mark.parametrize(("shown", "admitted"), [("right", True), (b"right", True), ("wrong", False), (None, False)])
def test_only_the_right_token_is_admitted(shown: str | bytes | None, admitted: bool) -> None:
    assert Security(token="right").admits(shown) == admitted
    assert Security().admits(shown)
    assert not Security(token="right").admits("rïght\udc80")


@pytest.mark.parametrize("token", ["", "two words", "line\nbreak", "ünïcode", "x" * 5000])
def test_tokens_that_no_header_carries_are_refused(token: str) -> None:
    with pytest.raises(SettingError, match=r"security\.token must be") as refused:
        Security(token=token).check("127.0.0.1:1")
    assert not token or token not in str(refused.value)


def test_addresses_are_taken_apart() -> None:
    assert split("[::1]:80") == ("::1", 80)
    assert split("node-1.cluster:65535") == ("node-1.cluster", 65535)
    hosts = ("127.0.0.1", "127.9.9.9", "::1", "localhost", "0.0.0.0", "::", "10.0.0.1", "localhost.evil.org")
    assert [is_loopback(host) for host in hosts] == [True] * 4 + [False] * 4


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "10.1.2.3:5000", "node-1:5000"])
def test_open_addresses_need_certificates_or_a_word(address: str) -> None:
    says = "is open to other machines and security has no certificates; give ca, certificate and key, or insecure=True"
    with pytest.raises(SettingError, match=says):
        GrpcServer(Desk(), address, Security(token="x"))
    with pytest.raises(SettingError, match=says):
        GrpcChannel(address, Security(token="x"))
    Security(insecure=True).check(address)
    Security("ca", "certificate", "key").check(address)


def test_files_are_named_where_they_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "empty.pem").write_text("nothing")
    with pytest.raises(SettingError, match=r"security\.ca=ca\.pem needs security\.certificate beside it"):
        Security("ca.pem").check("127.0.0.1:1")
    with pytest.raises(SettingError, match=r"security\.ca=.*none\.pem cannot be read \(No such file"):
        GrpcChannel("127.0.0.1:1", Security(str(tmp_path / "none.pem"), "b", "c"))
    with pytest.raises(SettingError, match=r"security\.ca=.*empty\.pem is no PEM file"):
        GrpcServer(Desk(), security=Security(str(tmp_path / "empty.pem"), "b", "c")).__enter__()
    ca, certificate, other = (str(certificates() / name) for name in ("ca.pem", "certificate.pem", "ca.key"))
    with pytest.raises(SettingError, match=r"security\.key=.*ca\.key is not the key of security\.certificate=.*; give"):
        GrpcChannel("127.0.0.1:1", Security(ca, certificate, other))


@pytest.mark.parametrize("size", [0, 9 << 20])
@pytest.mark.parametrize("token", [None, "wrong"])
def test_strangers_are_turned_away_before_anything_is_read(token: str | None, size: int) -> None:
    desk = Desk()
    with GrpcServer(desk, security=Security(token="right")) as server:
        says = "the token is missing or wrong; give the server's as HETPIPE_TOKEN"
        stranger = GrpcChannel(server.address, Security(token=token))
        with closing(stranger), pytest.raises(CallRefused, match=says):
            stranger.call("echo", b"", [memoryview(bytearray(size))])
        assert desk.calls == []
        with closing(GrpcChannel(server.address, Security(token="right"))) as channel:
            assert channel.call("echo", b"ab") == b"ba"


def test_both_sides_must_show_a_certificate() -> None:
    """A stranger without one, with one that another authority signed, and a server that has none."""
    ours, folder = security("tls"), certificates()
    assert ours is not None
    certificates.cache_clear()
    theirs = certificates()
    desk = Desk()
    with GrpcServer(desk, "127.0.0.1:0", ours) as server:
        mixed = Security(str(folder / "ca.pem"), str(theirs / "certificate.pem"), str(theirs / "key.pem"), ours.token)
        others = Security(str(theirs / "ca.pem"), mixed.certificate, mixed.key, ours.token)
        for stranger in (Security(token=ours.token), mixed):  # as a server that dies looks from here
            says = "does it want other certificates than security has"
            with closing(GrpcChannel(server.address, stranger)) as channel, pytest.raises(Unreachable, match=says):
                channel.call("echo", b"")
        says = r"shows no certificate that security\.ca has signed; give"
        with closing(GrpcChannel(server.address, others)) as channel, pytest.raises(CallRefused, match=says):
            channel.call("echo", b"")
        with closing(GrpcChannel(server.address, ours)) as channel:
            assert channel.call("echo", b"ab") == b"ba"
    assert desk.ran() == ["echo"]
    with (
        serve("grpc", desk) as plain,
        closing(connect("tls", plain.address)) as channel,
        pytest.raises(CallRefused, match="does not speak TLS, and security has certificates"),
    ):
        channel.call("echo", b"")
