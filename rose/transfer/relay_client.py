"""The client of a relay: a `Source` over HTTP, for several threads.

A relay answers these, each with `Authorization: Bearer TOKEN` (`relay.py`):

    GET /files/PATH    with Range, If-Match, and `X-Rose-Fresh: 1` to forget what it has
    GET /stat/PATH     [size in bytes, tag] or null
    GET /names/PATH    ["names", "of the folder"]
    PUT /leases/NAME   {"edges": [...], "seconds": s}
    GET /metrics       counters, Prometheus text format

`X-Rose-Wait` is how many seconds the client waits for an answer; 503 says what the relay waited for
itself. Left out: TLS (put both ends into one trusted network, or a tunnel between them).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import quote

import msgspec
import urllib3

from rose.transfer.errors import TransferError
from rose.transfer.source import Changed, Missing, Refused, Stat, checked, checked_lease

ATTEMPT_S = 10.0  # without a byte: the connection is taken for dead, and another one tried
_CONNECT_S = 3.0
# bytes taken from a connection at a time; of the last piece before it breaks nothing is kept
_PIECE = 1 << 17
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0  # between attempts; doubles
_CONNECTIONS = 32  # kept open; more threads than that open one for each request

_TAG = re.compile(r"[A-Za-z0-9._-]{1,64}")

T = TypeVar("T")


class _Unavailable(Exception):
    """The relay can't answer now; the text is its own."""


class Relayed:
    """The store behind the relay at `url`, http://host:port. `timeout_s`: seconds without a byte
    after which a relay that is unreachable, or can't reach its upstream, is given up. Raises
    `Refused` at once on a wrong token."""

    def __init__(self, url: str, token: str | None, timeout_s: float = 30.0):
        parsed = urllib3.util.parse_url(url)
        if (
            parsed.scheme not in ("http", "https")
            or not parsed.host
            or parsed.path not in (None, "", "/")
        ):
            raise TransferError(
                f"{url}: expected http://host:port, the address that a relay prints"
            )
        if not token:
            raise TransferError(
                f"{url}: a relay needs its token; give the token file that it was started with"
            )
        self.url = f"{parsed.scheme}://{parsed.netloc}"
        self.timeout_s = timeout_s
        self._pool = urllib3.connection_from_url(self.url, maxsize=_CONNECTIONS)
        self._headers = {"Authorization": f"Bearer {token}", "Accept-Encoding": "identity"}

    def __str__(self) -> str:
        return self.url

    def names(self, path: str) -> list[str]:
        return self._ask("GET", "names", checked(path, root_too=True), list[str])

    def size(self, path: str) -> int | None:
        found = self.stat(path)
        return None if found is None else found.size

    def stat(self, path: str) -> Stat | None:
        found = self._ask("GET", "stat", checked(path), Stat | None)
        if found is not None and not _TAG.fullmatch(found.tag):
            raise TransferError(
                f"{self.url}: {path}: tag {found.tag[:100]!r}: expected 1 to 64 letters, digits or ._-"
            )
        return found

    def hold(self, holder: str, edges: list[str], seconds: float) -> None:
        checked_lease(holder, edges, seconds)
        self._ask(
            "PUT", "leases", holder, dict, msgspec.json.encode({"edges": edges, "seconds": seconds})
        )

    def read(
        self,
        path: str,
        offset: int = 0,
        length: int | None = None,
        fresh: bool = False,
        tag: str | None = None,
    ) -> bytes:
        if offset < 0 or (length is not None and length < 0):
            raise Refused(f"{self.url}: {path}: {length} bytes from {offset} were asked for")
        if length == 0:
            return b""
        reading = _Reading(self, checked(path), offset, length, fresh, tag)
        self._persist(path, reading.go_on, lambda: reading.got)
        return reading.parts[0] if len(reading.parts) == 1 else b"".join(reading.parts)

    def close(self) -> None:
        self._pool.close()

    def _ask(
        self, method: str, kind: str, path: str, type: type[T], body: bytes | None = None
    ) -> T:
        def attempt(wait_s: float) -> T:
            response = self.request(method, kind, path, wait_s, {}, body)
            try:
                return msgspec.json.decode(response.read(), type=type)
            except msgspec.DecodeError as error:
                raise TransferError(
                    f"{self.url}: {kind} of {path!r}: no sensible answer: {error}"
                ) from error
            finally:
                response.release_conn()

        return self._persist(path, attempt, lambda: 0)

    def _persist(self, path: str, attempt: Callable[[float], T], progress: Callable[[], int]) -> T:
        """`attempt(seconds)` until it returns or raises something final; gives up after `timeout_s`
        seconds in which `progress` did not grow."""
        until, before, pause = time.monotonic() + self.timeout_s, 0, _FIRST_PAUSE_S
        while True:
            try:
                return attempt(max(0.1, min(until - time.monotonic(), ATTEMPT_S)))
            except (urllib3.exceptions.HTTPError, _Unavailable) as error:
                why = error
            if progress() > before:
                until, before, pause = time.monotonic() + self.timeout_s, progress(), _FIRST_PAUSE_S
            if time.monotonic() + pause > until:
                raise TransferError(
                    f"{self.url}: {path}: {why}; given up after {self.timeout_s:g} s without a byte"
                ) from why
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def request(
        self,
        method: str,
        kind: str,
        path: str,
        wait_s: float,
        headers: dict[str, str],
        body: bytes | None = None,
    ) -> urllib3.BaseHTTPResponse:
        """The relay's answer if it is a good one, its body unread. Raises `_Unavailable`, `Missing`
        or `Refused`."""
        # less: to hear from it what it lacks
        words = self._headers | headers | {"X-Rose-Wait": f"{0.8 * wait_s:.3f}"}
        response = self._pool.request(
            method,
            f"/{kind}/{quote(path)}",
            body=body,
            headers=words,
            retries=False,
            redirect=False,
            preload_content=False,
            timeout=urllib3.Timeout(connect=min(wait_s, _CONNECT_S), read=wait_s),
        )
        if response.status in (200, 206):
            return response
        text = f"{response.status}: {response.read(2000).decode(errors='replace').strip()}"
        response.close()
        if response.status >= 500:
            raise _Unavailable(text)
        if "X-Rose-Relay" not in response.headers:
            raise Refused(
                f"{self.url}: {path}: no relay of ROSE answers there, but something else: {text[:200]}"
            )
        kinds = {401: Refused, 404: Missing, 412: Changed}
        raise kinds.get(response.status, Refused)(f"{self.url}: {path}: {text}")


class _Reading:
    """One range of one file, gathered over as many connections as it takes."""

    def __init__(
        self,
        relayed: Relayed,
        path: str,
        offset: int,
        length: int | None,
        fresh: bool,
        tag: str | None,
    ):
        self._relayed, self._path, self._offset, self._length = relayed, path, offset, length
        self._fresh, self._tag = fresh, tag
        self.parts: list[bytes] = []
        self.got = 0

    def go_on(self, wait_s: float) -> None:
        """Ask for what is missing. Raises urllib3's errors where the connection ended before its
        time."""
        if self.got == self._length:
            return
        begin = self._offset + self.got
        end = "" if self._length is None else self._offset + self._length - 1
        headers = {"Range": f"bytes={begin}-{end}"}
        if self._tag is not None:
            headers["If-Match"] = f'"{self._tag}"'
        if self._fresh:
            headers["X-Rose-Fresh"] = "1"
        response = self._relayed.request("GET", "files", self._path, wait_s, headers)
        try:
            self._expect(response, begin)
            while piece := response.read(_PIECE):
                self.parts.append(piece)
                self.got += len(piece)
            if self.got != self._length:
                raise urllib3.exceptions.ProtocolError(
                    f"connection ended after {self.got} of {self._length} bytes"
                )
            response.release_conn()
        finally:
            response.close()  # a whole answer has given its connection back by now

    def _expect(self, response: urllib3.BaseHTTPResponse, begin: int) -> None:
        """Note what file this is, for the next connection, and how long. Raises `TransferError` if
        the relay sends something else than was asked for."""
        length = int(response.headers.get("Content-Length", -1))
        if self._length is None:
            self._length = begin - self._offset + length
        self._tag = self._tag or response.headers.get("ETag", "").strip('"') or None
        if length != self._length - self.got:
            raise TransferError(
                f"{self._relayed.url}: {self._path}: {self._length - self.got} bytes from {begin} were "
                f"asked for, the relay sends {length}"
            )
