"""Frames come out whole and in order, however the stream cuts them; one that is too long is
refused before it is received."""

import asyncio
import socket

import pytest

from rose.comm.frames import FrameError, Frames, frame, read

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
