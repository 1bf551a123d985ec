"""What a pool and its workers send each other, each in a frame of its own (rose/comm/frames.py)."""

from __future__ import annotations

import msgspec

from rose.reward.episode import Score

FRAME_BYTES = 2**28
HELLO_BYTES = 4_096  # of whom the pool doesn't know yet
BEAT = b""  # both ways between a pool and a joined rank: a sign of life
BEAT_S = 1.0
LOST_S = 10.0  # without one
STOP = b"stop"  # pool -> joined rank: not needed any more
AGAIN = b"again"  # ... disconnected; another may join


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Worker -> pool: its first word."""

    token: str
    worker: int


class Work(msgspec.Struct, frozen=True, tag=True):
    """Pool -> worker: score this episode (JSON) within `limit_s` seconds."""

    number: int
    limit_s: float
    episode: bytes


class Answer(msgspec.Struct, frozen=True, tag=True):
    """Worker -> pool: `score`, or why there is none."""

    number: int
    score: Score | None
    error: str
    seconds: float


class Leaving(msgspec.Struct, frozen=True, tag=True):
    """Joined rank -> pool: its last word. `fault`: its worker died, maybe of what it computed."""

    why: str
    fault: bool
