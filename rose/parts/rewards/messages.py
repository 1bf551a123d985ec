"""Messages between a pool and its workers over TCP, each in a frame (rose/comm/frames.py).

A pool's file, which only the run's user can read, has its addresses and its token. An address may
lead a worker to another process, so each side first proves that it knows the token, which is never
sent. A proof is valid for one address, that to which the worker connects. So the other process
can't forward the pool's proof. Loopback leads to the pool only on the pool's host.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
from pathlib import Path

import msgspec

from rose.reward.episode import Score

FRAME_BYTES = 2**28  # largest frame
HELLO_BYTES = 4_096  # largest frame from a sender that hasn't shown the token yet
LOST_S = 10  # seconds without a packet of the other side's host after which a connection ends
NONCE_BYTES = 32
STOP = b""  # pool -> worker of a Slurm job: end, and let the job start no other in its place


def folder(run_dir: Path, pool: int) -> Path:
    """Return a pool's folder, with its file (`pool.json`) and its workers' logs."""
    return run_dir / "rewards" / f"pool-{pool}"


def proof(token: str, side: str, nonce: bytes, address: tuple) -> bytes:
    """Return the digest by which `side` ("pool" or "worker") proves that it knows the token.
    `address` is the pool's end of the connection, as a socket gives it."""
    place = f"{side} {address[0]} {address[1]} ".encode()
    return hmac.digest(token.encode(), place + nonce, "sha256")


def end_when_lost(writer: asyncio.StreamWriter) -> None:
    """Let the kernel end the connection `LOST_S` seconds after the other side's host has died."""
    channel = writer.get_extra_info("socket")
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, LOST_S // 2)
    channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_S * 1000)


class PoolFile(msgspec.Struct, frozen=True):
    """The file by which a worker reaches its pool on `host`: (address, port) pairs, with loopback
    first, and the token."""

    host: str
    addresses: list[tuple[str, int]]
    token: str


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Worker -> pool: its first message, which answers the pool's nonce with a proof. `worker` is
    the number of one of the pool's own workers, and None for a worker of a Slurm job."""

    worker: int | None
    proof: bytes
    nonce: bytes


class Work(msgspec.Struct, frozen=True, tag=True):
    """Pool -> worker: score this episode (JSON) within `limit_s` seconds."""

    number: int
    limit_s: float
    episode: bytes


class Answer(msgspec.Struct, frozen=True, tag=True):
    """Worker -> pool: the `score`, or if there is none, the `error`."""

    number: int
    score: Score | None
    error: str
    seconds: float
