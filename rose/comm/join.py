"""Let a rank of another job join a running job, although either job may vanish at any time.

    outputs/RUN/join/endpoint.json    the running attempt: protocol version, and a count that grows while it runs
    outputs/RUN/join/token            the run's token; a rank that cannot read it cannot join (mode 0600, folder 0700)
    outputs/RUN/join/ID.asks          a rank's request to join, with the token and its protocol version
    outputs/RUN/join/ID.answer        the answer: admitted (its name, the MPI port), or refused with a reason
    outputs/RUN/join/ID.comes         ID.asks renamed: the rank's engine is up, and it connects at once

An admitted rank connects to the port of its own porter (rose/comm/porter.py). The porter accepts
only after ID.comes exists, so a rank that dies earlier blocks nothing. rose/coordinator/borrowed.py
describes the messages after that.
"""  # noqa: E501

from __future__ import annotations

import hmac
import os
import secrets
import socket
import time
import uuid
from pathlib import Path

import msgspec

from rose.files import write_whole
from rose.protocol import PROTOCOL_VERSION

# Seconds for connecting to the porter, which accepts at the same time.
CONNECT_S = 10
POLL_S = 0.05  # seconds between two checks for the answer
_MAX_FILE_BYTES = 65536


class JoinError(RuntimeError):
    """A rank can't join; the message says why. If `temporary`, a later attempt may succeed."""

    def __init__(self, message: str, temporary: bool) -> None:
        super().__init__(message)
        self.temporary = temporary


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    protocol: int
    attempt: int
    # A heartbeat that grows while the run is alive, so that a reader needs no common clock.
    beats: int


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    protocol: int
    token: str
    host: str
    pid: int
    job: str = ""  # Slurm's id of the serving job


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    worker: str = ""  # the name of the admitted rank, empty if it was refused
    port: str = ""
    reason: str = ""
    temporary: bool = False


def folder(run_dir: Path) -> Path:
    return Path(run_dir) / "join"


def _write(path: Path, record: msgspec.Struct | str) -> None:
    """Write a file atomically, readable for the same user only."""
    data = record.encode() if isinstance(record, str) else msgspec.json.encode(record)
    write_whole(path, data, private=True)


def _read(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(_MAX_FILE_BYTES)


# --------------------------------------------------------------------------- the coordinator's side


class Door:
    """The folder in which ranks ask to join, one per attempt. Any thread may call it, but only one
    call may run at a time."""

    def __init__(self, run_dir: Path, attempt: int) -> None:
        self.folder = folder(run_dir)
        self.token = secrets.token_hex(32)
        self._endpoint = Endpoint(protocol=PROTOCOL_VERSION, attempt=attempt, beats=0)
        self._seen: set[str] = set()

    def open(self) -> None:
        """Remove an earlier attempt's files and let ranks ask to join. Raises `OSError`."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        for old in self.folder.iterdir():
            old.unlink(missing_ok=True)
        _write(self.folder / "token", self.token)
        self.beat()

    def beat(self) -> None:
        """Write the endpoint with a higher count, which shows that the run is alive."""
        self._endpoint = msgspec.structs.replace(self._endpoint, beats=self._endpoint.beats + 1)
        _write(self.folder / "endpoint.json", self._endpoint)

    def close(self) -> None:
        """Let no more ranks ask to join."""
        (self.folder / "endpoint.json").unlink(missing_ok=True)

    def poll(self) -> tuple[list[tuple[str, Ask | str]], list[str]]:
        """Return what is new since the last poll: requests to join, and ids of ranks that connect.
        A request is (id, request), or (id, error text) if it is malformed or not allowed."""
        paths = [p for p in sorted(self.folder.iterdir()) if p.suffix in (".asks", ".comes")]
        new = [path for path in paths if path.name not in self._seen]
        self._seen = {path.name for path in paths}
        asks = [(path.stem, self._check(path)) for path in new if path.suffix == ".asks"]
        return asks, [path.stem for path in new if path.suffix == ".comes"]

    def answer(
        self, id: str, worker: str = "", port: str = "", reason: str = "", temporary: bool = False
    ) -> None:
        """Admit rank `id` as `worker` at the MPI port `port`, or refuse it with a reason."""
        if not worker:
            (self.folder / f"{id}.asks").unlink(missing_ok=True)
        answer = Answer(worker=worker, port=port, reason=reason, temporary=temporary)
        _write(self.folder / f"{id}.answer", answer)

    def forget(self, id: str) -> None:
        """Remove the files of a rank that has connected, or that will never connect."""
        for suffix in (".asks", ".answer", ".comes"):
            (self.folder / f"{id}{suffix}").unlink(missing_ok=True)

    def is_asking(self, id: str) -> bool:
        """True while the request of a rank exists. The rank removes it to withdraw it."""
        return any((self.folder / f"{id}{suffix}").exists() for suffix in (".asks", ".comes"))

    def is_token(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self.token.encode())

    def _check(self, path: Path) -> Ask | str:
        """Return the request, or an error text."""
        try:
            content = msgspec.json.decode(_read(path))
            protocol = content.get("protocol") if isinstance(content, dict) else None
            # The version is checked first, because other versions may have other fields.
            if protocol != PROTOCOL_VERSION:
                return (
                    f"it speaks protocol version {protocol!r}, this run {PROTOCOL_VERSION}; start "
                    "the serving job with the run's own release of ROSE"
                )
            ask = msgspec.convert(content, Ask)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            return f"{path.name} is no request to join: {error}"
        if not self.is_token(ask.token):
            return f"its token is not the run's (the content of {self.folder / 'token'})"
        return ask


# -------------------------------------------------------------------------- the joining rank's side


def endpoint(run_dir: Path) -> Endpoint | None:
    """Return the endpoint of the run's last attempt, which may be dead; None without an endpoint.
    Raises `JoinError` if it can't be read, or has another protocol version."""
    path = folder(run_dir) / "endpoint.json"
    try:
        found = msgspec.json.decode(_read(path), type=Endpoint)
    except FileNotFoundError:
        return None
    except PermissionError:
        raise JoinError(
            f"{path}: not readable for {os.environ.get('USER', 'this user')}; a serving job runs "
            "as the user whose training it joins",
            temporary=False,
        ) from None
    except (OSError, msgspec.MsgspecError) as error:
        raise JoinError(f"{path}: {error}", temporary=True) from None
    if found.protocol != PROTOCOL_VERSION:
        raise JoinError(
            f"{path}: the run speaks protocol version {found.protocol}, this process "
            f"{PROTOCOL_VERSION}; use one release of ROSE for both",
            temporary=False,
        )
    return found


class Application:
    """An attempt of one rank to join: `ask`, then `connect` to the port of the answer."""

    def __init__(self, run_dir: Path) -> None:
        self.folder = folder(run_dir)
        self.id = uuid.uuid4().hex
        self.token = ""

    def ask(self, deadline_s: float) -> Answer:
        """Ask to join and wait for the answer. Raises `JoinError` if the run refuses, or does not
        answer within `deadline_s` seconds."""
        try:
            self.token = _read(self.folder / "token").decode()
            ask = Ask(
                protocol=PROTOCOL_VERSION,
                token=self.token,
                host=socket.gethostname(),
                pid=os.getpid(),
                job=os.environ.get("SLURM_JOB_ID", ""),
            )
            _write(self._path("asks"), ask)
        except OSError as error:
            raise JoinError(
                f"{self.folder}: {error.strerror}; the run has just ended, or its folder is not "
                "writable here",
                temporary=True,
            ) from None
        end = time.monotonic() + deadline_s
        while not self._path("answer").exists():
            if time.monotonic() > end:
                self.withdraw()
                raise JoinError(
                    f"{self.folder.parent}: no answer within {deadline_s:g} s; the run is gone or "
                    "stuck",
                    temporary=True,
                )
            time.sleep(POLL_S)
        answer = msgspec.json.decode(_read(self._path("answer")), type=Answer)
        if not answer.worker:
            self.withdraw()
            raise JoinError(f"{self.folder.parent} refused: {answer.reason}", answer.temporary)
        return answer

    def connect(self, port: str):
        """Connect to the porter and return the intercommunicator. Raises `JoinError` if that fails
        or takes longer than `CONNECT_S` seconds."""
        from mpi4py import MPI

        from rose.comm import mpi_process

        mpi_process.unlink_shared(MPI.COMM_WORLD)
        info = MPI.Info.Create()
        info.Set("timeout", str(CONNECT_S))
        MPI.COMM_SELF.Set_errhandler(MPI.ERRORS_RETURN)
        try:
            self._path("asks").rename(self._path("comes"))
            return self._connect(MPI, port, info)
        except (MPI.Exception, OSError) as error:
            text = " ".join(str(error).split())[:200]
            raise JoinError(
                f"{self.folder.parent}: no connection to its coordinator within {CONNECT_S} s "
                f"({text})",
                temporary=True,
            ) from None
        finally:
            self.withdraw()

    def _connect(self, MPI, port: str, info):
        """Connect, and retry while MPICH reports EAGAIN: the network is still connecting. MPICH's
        own retries are few (conf/cluster/mpi), because otherwise a send to a dead peer hangs."""
        end = time.monotonic() + CONNECT_S
        while True:
            try:
                return MPI.COMM_SELF.Connect(port, info)
            except MPI.Exception as error:
                if "EAGAIN" not in str(error) or time.monotonic() > end:
                    raise
                time.sleep(0.002)

    def withdraw(self) -> None:
        for suffix in ("asks", "answer", "comes"):
            self._path(suffix).unlink(missing_ok=True)

    def _path(self, suffix: str) -> Path:
        return self.folder / f"{self.id}.{suffix}"
