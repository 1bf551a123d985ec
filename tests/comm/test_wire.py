"""Messages survive the wire exactly; anything else is one clear error."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose import protocol as p
from rose.comm import wire

TURN = p.TurnRequest(
    "g0.0.t0", "g0.0", "g0", p.Phase.TRAIN, p.pack_tokens(range(100)), p.Sampling(8, seed=3)
)


@pytest.mark.parametrize(
    "message",
    [
        TURN,
        p.Shutdown("done"),
        p.TrainStep(1, p.BatchSummary([1.0], [0], [5], [False]), [[[0]]], False, 1),
        p.TrainPart(
            1,
            0,
            [0],
            [p.Trajectory("g0.0", "g0", p.Phase.EVAL, b"\1", b"\1", b"", b"", 1.0, True, 1, 1)],
        ),
        p.TrajectoryFinished(
            p.Trajectory(
                *("g0.0", "g0", p.Phase.TRAIN, b"\1", b"\1", b"", b"", 0.75, True, 2, 2),
                branches=[p.Branch(b"\1", b"\1", b"", b"", [(1, 1)])],
                turn_tokens=[(0, 1)],
                turn_rewards=[0.25, 0.5],
            )
        ),
    ],
)
def test_a_message_comes_back_equal(message):
    assert wire.decode(wire.encode(message)) == message


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda d: b"HTTP" + d[4:], "begins with b'ROSE', this one with b'HTTP'"),
        (
            lambda d: d[:4] + struct.pack("<H", p.PROTOCOL_VERSION + 1) + d[6:],
            f"protocol version {p.PROTOCOL_VERSION + 1}, this rank {p.PROTOCOL_VERSION}",
        ),
        (lambda d: d[:-1], "promises"),
        (lambda d: d + b"x", "promises"),
        (lambda d: d[:5], "5 bytes are too few"),
        (
            lambda d: d[:12] + b"\xc1" * (len(d) - 12),
            f"not a message of protocol version {p.PROTOCOL_VERSION}",
        ),
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
