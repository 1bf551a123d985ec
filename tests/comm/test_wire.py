"""Messages survive the wire exactly, in frames that come out whole and in order however the stream
cuts them; anything else is one clear error."""

import asyncio
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose import protocol as p
from rose.comm import wire
from rose.comm.frames import FrameError, Frames, frame, read
from tests import made

TURN = p.TurnRequest(
    "g0.0.t0", "g0.0", "g0", p.Phase.TRAIN, p.pack_tokens(range(100)), p.Sampling(8, seed=3)
)


PLAIN = made.trajectory("g0.0", [1], [1], phase=p.Phase.EVAL)
LEAF = p.Branch(b"\1", b"\1", b"", b"", [(1, 1)])
TURNS = {"turn_tokens": [(0, 1)], "turn_rewards": [0.25, 0.5]}
TREE = made.trajectory("g0.0", [1], [1], branches=[LEAF], **TURNS)


@pytest.mark.parametrize(
    "message",
    [
        TURN,
        p.Shutdown("done"),
        p.TrainStep(1, p.BatchSummary([1.0], [0], [5], [False]), [[[0]]], False, 1),
        p.TrainPart(1, 0, [0], [PLAIN]),
        p.TrajectoryFinished(TREE),
    ],
)
def test_a_message_comes_back_equal(message):
    assert wire.decode(wire.encode(message)) == message


VERSION = p.PROTOCOL_VERSION
NEXT = struct.pack("<H", VERSION + 1)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda d: b"HTTP" + d[4:], "begins with b'ROSE', this one with b'HTTP'"),
        (lambda d: d[:4] + NEXT + d[6:], f"version {VERSION + 1}, this rank {VERSION}"),
        (lambda d: d[:-1], "promises"),
        (lambda d: d + b"x", "promises"),
        (lambda d: d[:5], "5 bytes are too few"),
        (lambda d: d[:12] + b"\xc1" * (len(d) - 12), f"not a message of .* version {VERSION}"),
    ],
)
def test_bad_bytes_are_one_clear_error(change, words):
    with pytest.raises(wire.WireError, match=words):
        wire.decode(change(wire.encode(TURN)))


@given(st.binary(max_size=200))
def test_garbage_never_does_worse_than_a_wire_error(data):
    body = struct.pack("<4sHHI", b"ROSE", p.PROTOCOL_VERSION, 0, len(data)) + data
    for candidate in (data, body):
        try:
            wire.decode(candidate)
        except wire.WireError:
            continue


def test_a_message_over_the_limit_does_not_leave(monkeypatch):
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 100)
    with pytest.raises(wire.WireError, match="TurnRequest has .* at most 100"):
        wire.encode(TURN)


BODIES = [b"", b"x", bytes(70_000), b"last"]


@pytest.fixture
def ends():
    left, right = socket.socketpair()
    yield left, right
    left.close()
    right.close()


def test_frames_are_whole_and_in_order_however_they_are_cut(ends):
    left, right = ends
    stream = b"".join(map(frame, BODIES))
    received, came = Frames(right, 70_000), []
    for cut in (1, 3, 4, 5, 69_000, len(stream)):
        left.sendall(stream[:cut])
        stream = stream[cut:]
        came += received.take()
    while len(came) < len(BODIES):  # a socket may hand over a large one in pieces
        came += received.take()
    assert came == BODIES
    left.close()
    assert received.take() is None


def test_a_frame_that_is_too_long_is_refused_by_its_length_alone(ends):
    left, right = ends
    left.sendall(frame(b"12345")[:4])
    with pytest.raises(FrameError, match="5 bytes is announced; at most 4"):
        Frames(right, 4).take()


async def test_a_stream_reader_gives_the_same_frames():
    reader = asyncio.StreamReader()
    reader.feed_data(b"".join(map(frame, BODIES)))
    came = [await read(reader, 70_000) for _ in BODIES]
    reader.feed_data(frame(b"12345"))
    with pytest.raises(FrameError):
        await read(reader, 4)
    reader.feed_eof()
    with pytest.raises(asyncio.IncompleteReadError):
        await read(reader, 2**31)  # The remaining bytes are not even a length.
    assert came == BODIES
