"""The schema of messages: what was sent arrives; what is off by a bit is refused before anything is done with it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetpipe.server.protocol import messages
from lightning_hetpipe.server.protocol.identifiers import LocalFault, Refusal, RemoteFault
from lightning_hetpipe.server.protocol.messages import CODEC, Done, Heartbeat, Message, Pushed, Refused, decode, encode
from lightning_hetpipe.server.transport.codec import MAGIC, MAX_LENGTH, PREFIX, VERSION

PUSHED = Pushed(1, 2, "generation", 3, False)


def framed(text: bytes) -> bytes:
    return PREFIX.pack(MAGIC, VERSION, len(text)) + text


def text_of(message: Message) -> typing.Any:
    return json.loads(encode(message)[PREFIX.size :])


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_every_message_arrives_as_it_was_sent(data: st.DataObject) -> None:
    st.register_type_strategy(int, st.integers(-(2**63), 2**63 - 1))
    st.register_type_strategy(str, st.text(st.characters(exclude_categories=["Cs"])))
    kind = data.draw(st.sampled_from(typing.get_args(Message)))
    message = data.draw(st.from_type(kind))
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "too few"),
        (b"HPWS", "too few"),
        (b"GET / HTTP/1.1\r\n\r\n", "begins with"),
        (PREFIX.pack(MAGIC, VERSION + 1, 2) + b"{}", f"version {VERSION + 1}"),
        (PREFIX.pack(MAGIC, VERSION, 3) + b"{}", "says 3 bytes and has 2"),
        (PREFIX.pack(MAGIC, VERSION, 2**32 - 1) + b"{}", "says 4294967295"),
        (encode(PUSHED)[:-1], "says"),
        (encode(PUSHED) + b" ", "says"),
        (b"H" * (PREFIX.size + MAX_LENGTH + 1), "too many"),
        (framed(b""), "JSONDecodeError"),
        (framed(b"\xff"), "UnicodeDecodeError"),
        (framed(b"[" * 100_000), "RecursionError"),
        (framed(b"1" * 100_000), "ValueError"),
        (framed(b"[]"), "one object"),
        (framed(b"{}"), "one object"),
        (framed(b'{"Done":{},"NotYet":{}}'), "one object"),
        (framed(b'{"Done":{"epoch":"a","epoch":"b"}}'), "repeated"),
        (framed(b'{"Codec":{}}'), "kind is 'Codec'"),
        (framed(b'{"Done":[]}'), "Done has not the fields epoch"),
        (framed(b'{"Done":{}}'), "Done has not the fields epoch"),
        (framed(b'{"Done":{"epoch":"a","more":1}}'), "Done has not the fields epoch"),
        (framed(b'{"Done":{"epoch":null,"departed":[]}}'), "Done.epoch is not of type str"),
        (framed(rb'{"Done":{"epoch":"\ud800","departed":[]}}'), "Done.epoch is not text"),
        (framed(b'{"Heartbeat":{"vw":true,"incarnation":0,"generation":""}}'), "Heartbeat.vw is not of type int"),
        (framed(b'{"Heartbeat":{"vw":1.0,"incarnation":0,"generation":""}}'), "malformed"),
        (framed(b'{"Heartbeat":{"vw":NaN,"incarnation":0,"generation":""}}'), "malformed"),
        (framed(b'{"Heartbeat":{"vw":9223372036854775808,"incarnation":0,"generation":""}}'), "64 bits"),
        (framed(b'{"Refused":{"epoch":"","refusal":"mood","why":""}}'), "Refused.refusal is none of its choices"),
        (framed(b'{"Refused":{"epoch":"","refusal":[],"why":""}}'), "Refused.refusal is none of its choices"),
    ],
)
def test_what_is_no_message_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(RemoteFault, match=why) as caught:
        decode(data)
    assert caught.value.refusal is Refusal.MALFORMED
    assert len(str(caught.value)) < 200  # not an echo of what a stranger sent


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200))
def test_bytes_are_a_message_or_one_kind_of_error(noise: bytes) -> None:
    for data in (noise, framed(noise)):
        with pytest.raises(RemoteFault):
            decode(data)


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_a_message_with_a_byte_changed_is_a_message_or_one_kind_of_error(data: st.DataObject) -> None:
    sent = bytearray(encode(PUSHED))
    sent[data.draw(st.integers(0, len(sent) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(RemoteFault):
        assert isinstance(decode(bytes(sent)), Message)


def test_an_enum_is_sent_as_its_value() -> None:
    assert text_of(Refused("e", Refusal.FENCED, "older")) == {
        "Refused": {"epoch": "e", "refusal": "fenced", "why": "older"}
    }


def test_what_would_not_be_understood_is_not_sent() -> None:
    @dataclasses.dataclass(frozen=True)
    class Done:
        epoch: str

    for other in (Done("e"), Refusal.FENCED, "Done"):
        with pytest.raises(LocalFault, match="is not a message"):
            encode(other)
    with pytest.raises(LocalFault, match="cannot be sent"):
        encode(messages.Done(object()))  # type: ignore[arg-type]  # what a careless caller does
    with pytest.raises(LocalFault, match="more than"):
        encode(messages.Done("e" * (MAX_LENGTH + 1)))


def test_messages_know_each_other_by_name() -> None:
    kinds = typing.get_args(Message)
    assert len({kind.__name__ for kind in kinds}) == len(kinds)
    assert CODEC.decode(encode(Heartbeat(0, 1, "g"))) == Heartbeat(0, 1, "g")
    assert CODEC.decode(memoryview(encode(Done("e")))) == Done("e")
