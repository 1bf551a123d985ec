"""Pull weight versions over a slow link once, and serve them to the engines on this side of it.

    training side:  rose relay outputs/RUN/weights --listen HOST:7673 --cache-gib 0
    serving side:   rose relay http://HOST:7673 --listen HOST2:7673 --token-file FILE --cache DIR

UPSTREAM is the run's weights folder, or another relay. A reader must send the token: the content
of a file of mode 0600. Without --token-file, the relay creates this file in the cache folder. All
relays of a run share one token. The link is not encrypted: put it into a trusted network or a
tunnel. A relay that is started again keeps its cache. `GET /metrics` has its counters. Ends on
SIGTERM or SIGINT.

    0 stopped       1 can't listen there   2 bad arguments
"""  # noqa: E501

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import re
import secrets
import sys
import tempfile
from pathlib import Path

from rose.files import at_home, write_whole
from rose.parts.relay.cache import Cache
from rose.parts.relay.server import serve
from rose.transfer import TransferError
from rose.transfer.source import open_source, read_token

LISTEN = "127.0.0.1:7673"  # R-O-S-E on a telephone's keys
CACHE_GIB = 32.0  # default of --cache-gib
# Timeout of one request to another relay. Clients that still wait after it cause another request.
UPSTREAM_S = 10.0
_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+)):(\d{1,5})")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="rose relay", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "upstream", metavar="UPSTREAM", help="the weights folder, or http://host:port of a relay"
    )
    parser.add_argument(
        "--listen", metavar="HOST:PORT", default=LISTEN, help=f"default {LISTEN}; port 0 finds one"
    )
    parser.add_argument(
        "--cache",
        metavar="DIR",
        type=at_home,
        help="default: a folder in the temporary folder, one for each UPSTREAM",
    )
    parser.add_argument(
        "--cache-gib",
        metavar="N",
        type=float,
        default=CACHE_GIB,
        help=f"most on disk, default {CACHE_GIB:.0f}; 0 keeps nothing, for a folder as fast as a "
        "cache",
    )
    parser.add_argument(
        "--token-file", metavar="FILE", type=at_home, help="default: DIR/token, created"
    )
    parser.add_argument(
        "--upstream-token-file",
        metavar="FILE",
        type=at_home,
        help="token file of an upstream relay, if not --token-file",
    )
    args = parser.parse_args(arguments)
    try:
        return _run(args)
    except TransferError as error:
        print(f"rose relay: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    """Check the arguments and serve until stopped; return the exit status."""
    listen = _ADDRESS.fullmatch(args.listen)
    if listen is None or int(listen[3]) > 65535:
        raise TransferError(f"--listen {args.listen!r}: expected HOST:PORT, as {LISTEN}")
    if not 0 <= args.cache_gib < 1e6:
        raise TransferError(f"--cache-gib {args.cache_gib}: expected 0 or more")
    remote = "://" in args.upstream
    upstream = args.upstream if remote else os.path.realpath(args.upstream)
    if not remote and not os.path.isdir(upstream):
        raise TransferError(
            f"UPSTREAM {args.upstream!r}: no such folder here; expected the run's weights folder, "
            "or http://host:port of another relay"
        )
    if not remote and os.path.isfile(f"{upstream}/config.json"):
        raise TransferError(
            f"UPSTREAM {args.upstream!r}: is a run's folder; its weights are in "
            f"{args.upstream.rstrip('/')}/weights"
        )
    upstream_token = None
    if remote:
        if not (args.upstream_token_file or args.token_file):
            raise TransferError(
                f"UPSTREAM {upstream}: give the token file of that relay (it prints at its start "
                "where it is), as --token-file, or as --upstream-token-file if this one has "
                "another"
            )
        upstream_token = read_token(args.upstream_token_file or args.token_file)
    source = open_source(upstream, upstream_token, UPSTREAM_S)
    # A default below TMPDIR is not resolved: a symbolic link there may be another user's.
    folder = args.cache.resolve() if args.cache else _default_cache(upstream)
    cache = Cache(folder, int(args.cache_gib * 2**30))
    token_file = args.token_file or folder / "token"
    if not args.token_file and not token_file.exists():
        write_whole(token_file, f"{secrets.token_hex(32)}\n".encode(), private=True)
    token = read_token(token_file)
    host, port = listen[1] or listen[2], int(listen[3])

    def announce(port: int) -> None:
        keeps = (
            f"{args.cache_gib:g} GiB in {folder}, {cache.bytes / 2**20:.0f} MiB there"
            if cache.limit
            else "nothing"
        )
        print(
            f"rose relay: http://{args.listen.rpartition(':')[0]}:{port} serves {upstream}; keeps "
            f"{keeps}; token file {token_file}",
            flush=True,
        )

    try:
        asyncio.run(serve(source, cache, token, host, port, announce))
    except OSError as error:
        print(f"rose relay: --listen {args.listen}: {error.strerror or error}", file=sys.stderr)
        return 1
    return 0


def _default_cache(upstream: str) -> Path:
    name = hashlib.sha256(upstream.encode()).hexdigest()[:8]
    return Path(tempfile.gettempdir()) / f"rose-relay-{os.geteuid()}-{name}"


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread that reads from a dead mount would keep the interpreter from exiting.
    os._exit(code)
