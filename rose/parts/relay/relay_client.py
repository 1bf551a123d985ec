"""The client of a relay: a thread-safe `Source` over HTTP.

A relay answers these requests, each with `Authorization: Bearer TOKEN` (server.py):

    GET /files/PATH    a file's bytes; takes Range, If-Match, and `Cache-Control: no-cache` to skip the cache
    GET /stat/PATH     [size in bytes, tag] or null
    GET /names/PATH    ["names", "of the folder"]
    GET /metrics       counters, Prometheus text format

There is no TLS: put both ends into one trusted network, or a tunnel between them.
"""  # noqa: E501

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import quote

import msgspec
import urllib3

from rose.transfer.errors import Corrupted, TransferError
from rose.transfer.source import Changed, Missing, Refused, Stat, checked

# Bounds the time without a byte, after which a connection counts as dead and another one is tried.
ATTEMPT_S = 10.0
_CONNECT_S = 3.0
# Bytes read from a connection at a time. A piece is lost if the connection breaks in it.
_PIECE = 1 << 17
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0  # pauses between attempts, doubling
_CONNECTIONS = 32  # connections kept open; further threads open one for each request
_TAG = re.compile(r"[A-Za-z0-9._-]{1,64}")
_FINAL = {401: Refused, 404: Missing, 412: Changed, 422: Corrupted}

T = TypeVar("T")


class _Unavailable(Exception):
    """The relay can't answer now; the message is the relay's."""


class Relayed:
    """The store of the relay at `where`, http://host:port[/folder]. If the relay or its upstream
    can't be reached, calls raise `TransferError` after `timeout_s` seconds without a byte. If the
    token is wrong, they raise `Refused` at once."""

    def __init__(self, where: str, token: str | None, timeout_s: float):
        scheme, _, rest = where.partition("://")
        host, _, folder = rest.partition("/")
        url, folder = f"{scheme}://{host}", folder.rstrip("/")
        try:
            parsed = urllib3.util.parse_url(url)
        except urllib3.exceptions.LocationParseError:
            parsed = urllib3.util.Url()
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise TransferError(
                f"{url}: expected http://host:port, the address that a relay prints"
            )
        if not token:
            raise TransferError(
                f"{url}: a relay needs its token; give the token file that it was started with"
            )
        self.url, self.timeout_s = f"{parsed.scheme}://{parsed.netloc}", timeout_s
        self._root = f"{checked(folder)}/" if folder else ""
        self._pool = urllib3.connection_from_url(self.url, maxsize=_CONNECTIONS)
        self._headers = {"Authorization": f"Bearer {token}", "Accept-Encoding": "identity"}

    def __str__(self) -> str:
        return f"{self.url}/{self._root}".rstrip("/")

    def names(self, path: str) -> list[str]:
        return self._ask("names", checked(path, root_too=True), list[str])

    def stat(self, path: str) -> Stat | None:
        found = self._ask("stat", checked(path), Stat | None)
        if found is not None and not _TAG.fullmatch(found.tag):
            raise TransferError(
                f"{self}: {path}: tag {found.tag[:100]!r}: expected 1 to 64 letters, digits or ._-"
            )
        return found

    def read(
        self,
        path: str,
        offset: int = 0,
        length: int | None = None,
        fresh: bool = False,
        tag: str | None = None,
    ) -> bytes:
        """Read as `Source.read` does. Continue over a new connection when one breaks."""
        if offset < 0 or (length is not None and length < 0):
            raise Refused(f"{self}: {path}: {length} bytes from {offset} were asked for")
        if length == 0:
            return b""
        got = bytearray()
        headers = {"Cache-Control": "no-cache"} if fresh else {}
        if tag is not None:
            headers["If-Match"] = f'"{tag}"'
        whole = length  # bytes in all; None until the relay reports them

        def attempt(wait_s: float) -> None:
            nonlocal whole
            if whole == len(got):
                return  # The connection broke after the last byte.
            begin = offset + len(got)
            last = "" if whole is None else offset + whole - 1
            headers["Range"] = f"bytes={begin}-{last}"
            response = self._request("files", checked(path), wait_s, headers)
            try:
                announced = int(response.headers.get("Content-Length", -1))
                if announced < 0:
                    raise TransferError(
                        f"{self}: {path}: the answer has no Content-Length; a proxy that changes "
                        "answers stands between here and the relay"
                    )
                whole = len(got) + announced if whole is None else whole
                if announced != whole - len(got):
                    raise TransferError(
                        f"{self}: {path}: {whole - len(got)} bytes from {begin} were asked for, "
                        f"the relay sends {announced}"
                    )
                # The next connection must send bytes of the same file.
                headers["If-Match"] = response.headers.get("ETag", '"none"')
                while piece := response.read(_PIECE):
                    got.extend(piece)
                if len(got) != whole:
                    raise urllib3.exceptions.ProtocolError(
                        f"connection ended after {len(got)} of {whole} bytes"
                    )
                response.release_conn()
            finally:
                response.close()  # A complete answer has returned its connection already.

        self._retry(path, attempt, got.__len__)
        return bytes(got)

    def close(self) -> None:
        self._pool.close()

    def _ask(self, kind: str, path: str, type: type[T]) -> T:
        """Return the relay's JSON answer of type `type`; retry as `_retry` does."""

        def attempt(wait_s: float) -> T:
            response = self._request(kind, path, wait_s, {})
            try:
                return msgspec.json.decode(response.read(), type=type)
            except msgspec.DecodeError as error:
                raise TransferError(
                    f"{self}: {kind} of {path!r}: no sensible answer: {error}"
                ) from error
            finally:
                response.release_conn()

        return self._retry(path, attempt, lambda: 0)

    def _retry(self, path: str, attempt: Callable[[float], T], progress: Callable[[], int]) -> T:
        """Call `attempt(seconds)` until it returns or raises a final error. Raises `TransferError`
        after `timeout_s` seconds in which `progress()` did not grow."""
        until, before, pause = time.monotonic() + self.timeout_s, 0, _FIRST_PAUSE_S
        why: Exception | None = None
        while True:
            try:
                return attempt(max(0.1, min(until - time.monotonic(), ATTEMPT_S)))
            except (urllib3.exceptions.HTTPError, _Unavailable) as error:
                failed = error
            if progress() > before:
                until, before, pause = time.monotonic() + self.timeout_s, progress(), _FIRST_PAUSE_S
                why = None
            # The relay's own reason says more than the timeout of a later, shorter attempt.
            late = isinstance(failed, urllib3.exceptions.TimeoutError)
            why = why if late and isinstance(why, _Unavailable) else failed
            if time.monotonic() + pause > until:
                raise TransferError(
                    f"{self}: {path}: {why}; given up after {self.timeout_s:g} s without a byte"
                ) from why
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _request(
        self, kind: str, path: str, wait_s: float, headers: dict[str, str]
    ) -> urllib3.BaseHTTPResponse:
        """Return the relay's answer with its body unread. Raises `_Unavailable` for a temporary
        failure, `Missing`, `Corrupted` or `Refused` for a final one."""
        response = self._pool.request(
            "GET",
            f"/{kind}/{quote(self._root + path)}",
            headers=self._headers | headers,
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
                f"{self}: {path}: no relay of ROSE answers there, but something else: {text[:200]}"
            )
        raise _FINAL.get(response.status, Refused)(f"{self}: {path}: {text}")
