"""Messages between a pool and its workers, each in a frame of its own (rose/comm/frames.py)."""

from __future__ import annotations

import msgspec

from rose.reward.episode import Score

FRAME_BYTES = 2**28  # largest frame
HELLO_BYTES = 4_096  # largest frame from a sender that hasn't shown the token yet
BEAT = b""  # pool <-> joined rank: heartbeat
BEAT_S = 1.0  # seconds between two heartbeats
LOST_S = 10.0  # seconds of silence after which the other side counts as lost
STOP = b"stop"  # pool -> joined rank: leave, and don't join again
AGAIN = b"again"  # pool -> joined rank: leave; the job may send another rank


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Worker -> pool: its first message."""

    token: str
    worker: int


class Work(msgspec.Struct, frozen=True, tag=True):
    """Pool -> worker: score this episode (JSON) within `limit_s` seconds."""

    number: int
    limit_s: float
    episode: bytes


class Answer(msgspec.Struct, frozen=True, tag=True):
    """Worker -> pool: the `score`, or the `error` for which there is none."""

    number: int
    score: Score | None
    error: str
    seconds: float


class Leaving(msgspec.Struct, frozen=True, tag=True):
    """Joined rank -> pool: its last message. `fault`: its worker died, perhaps because of an answer
    that it was scoring."""

    why: str
    fault: bool
