"""The schema of messages: what was sent arrives; what is off by a bit is refused before anything is done with it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetpipe.server.protocol import messages
from lightning_hetpipe.server.protocol.identifiers import LocalFault, Refusal, RemoteFault
from lightning_hetpipe.server.protocol.messages import (
    Done,
    Heartbeat,
    Message,
    Pushed,
    decode,
    encode,
)
from lightning_hetpipe.server.transport.codec import Codec, Malformed
from lightning_hetpipe.server.transport.frames import Answer, Outcome
from lightning_hetpipe.server.transport.interface import HEADER_LIMIT
from tests.support.marks import explores

PUSHED = Pushed(1, 2, "generation", 3, False)


@explores(200)
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
        (b"", "JSONDecodeError"),
        (b"GET / HTTP/1.1\r\n\r\n", "JSONDecodeError"),
        (encode(PUSHED)[:-1], "JSONDecodeError"),
        (encode(PUSHED) + b"}", "JSONDecodeError"),
        (b"1" * (HEADER_LIMIT + 1), "too many"),
        (b"\xff", "UnicodeDecodeError"),
        (b"[" * 100_000, "RecursionError"),
        (b"1" * 100_000, "ValueError"),
        (b"[]", "one object"),
        (b"{}", "one object"),
        (b'{"Done":{},"NotYet":{}}', "one object"),
        (b'{"NotYet":{"waits_for":"a","waits_for":"b"}}', "repeated"),
        (b'{"Codec":{}}', "kind is 'Codec'"),
        (b'{"NotYet":[]}', "NotYet must be a mapping of waits_for"),
        (b'{"NotYet":{}}', "NotYet.waits_for is missing"),
        (b'{"NotYet":{"waits_for":"a","more":1}}', "NotYet.more is not a setting"),
        (b'{"NotYet":{"waits_for":null,"missing":[]}}', "NotYet.waits_for must be text"),
        (rb'{"NotYet":{"waits_for":"\ud800","missing":[]}}', "UnicodeEncodeError"),
        (b'{"Heartbeat":{"vw":true,"incarnation":0,"generation":""}}', "Heartbeat.vw must be a whole number"),
        (b'{"Heartbeat":{"vw":1.0,"incarnation":0,"generation":""}}', "malformed"),
        (b'{"Heartbeat":{"vw":NaN,"incarnation":0,"generation":""}}', "malformed"),
        (b'{"Heartbeat":{"vw":9223372036854775808,"incarnation":0,"generation":""}}', "64 bits"),
    ],
)
def test_what_is_no_message_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(RemoteFault, match=why) as caught:
        decode(data)
    assert caught.value.refusal is Refusal.MALFORMED
    assert len(str(caught.value)) < 200  # not an echo of what a stranger sent


@explores(300)
@given(st.binary(max_size=200))
def test_bytes_are_a_message_or_one_kind_of_error(noise: bytes) -> None:
    with pytest.raises(RemoteFault):
        decode(noise)


@explores(300)
@given(st.data())
def test_a_message_with_a_byte_changed_is_a_message_or_one_kind_of_error(data: st.DataObject) -> None:
    sent = bytearray(encode(PUSHED))
    sent[data.draw(st.integers(0, len(sent) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(RemoteFault):
        assert isinstance(decode(bytes(sent)), Message)


def test_an_enum_is_sent_as_its_value() -> None:
    codec = Codec((Answer,), 1000)
    sent = codec.encode(Answer(Outcome.PLACE_UNREADABLE, 3))
    assert json.loads(sent) == {"Answer": {"outcome": "place_unreadable", "size": 3, "place": None}}
    assert codec.decode(sent) == Answer(Outcome.PLACE_UNREADABLE, 3)
    for other in (b'"mood"', b"[]"):
        with pytest.raises(Malformed, match=r"Answer\.outcome must be"):
            codec.decode(sent.replace(b'"place_unreadable"', other))


def test_what_would_not_be_understood_is_not_sent() -> None:
    @dataclasses.dataclass(frozen=True)
    class Done:
        departed: str

    for other in (Done("e"), Refusal.FENCED, "Done"):
        with pytest.raises(LocalFault, match="is not a message"):
            encode(other)
    with pytest.raises(LocalFault, match="cannot be sent"):
        encode(messages.Done(object()))  # type: ignore[arg-type]  # what a careless caller does
    with pytest.raises(LocalFault, match="more than"):
        encode(messages.NotYet("e" * HEADER_LIMIT))


def test_messages_know_each_other_by_name() -> None:
    kinds = typing.get_args(Message)
    assert len({kind.__name__ for kind in kinds}) == len(kinds)
    assert decode(encode(Heartbeat(0, 1, "g"))) == Heartbeat(0, 1, "g")
    assert decode(memoryview(encode(Done()))) == Done()
