"""How a serving rank finds a running job and is let in, although either may vanish at any time.

    outputs/RUN/join/endpoint.json    the running attempt: protocol version, and a count that grows while it runs
    outputs/RUN/join/token            the run's token; a rank that cannot read it cannot join (mode 0600, folder 0700)
    outputs/RUN/join/ID.asks          announce: a rank shows token and protocol version and asks to join
    outputs/RUN/join/ID.answer        admitted (under which name, at which MPI port), or refused and why
    outputs/RUN/join/ID.comes         ID.asks renamed: its engine is up, it connects in the next instant

The admitted rank connects to the port, where a porter of its own (rose/comm/porter.py) accepts from
the last of these on: a rank that dies in between costs nothing. Left out: the messages afterwards
(rose/coordinator/borrowed.py).
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

CONNECT_S = 10  # the porter waits already
POLL_S = 0.05
_MAX_FILE_BYTES = 65536


class JoinError(RuntimeError):
    """It can't join; the message says why. `temporary`: asking again later may help."""

    def __init__(self, message: str, temporary: bool) -> None:
        super().__init__(message)
        self.temporary = temporary


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    protocol: int
    attempt: int
    beats: int  # grows while the run is alive: a reader needs no common clock


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    protocol: int
    token: str
    host: str
    pid: int
    job: str = ""  # Slurm's id of the serving job


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    worker: str = ""  # "": refused
    port: str = ""
    reason: str = ""
    temporary: bool = False


def folder(run_dir: Path) -> Path:
    return Path(run_dir) / "join"


def _write(path: Path, record: msgspec.Struct | str) -> None:
    """Atomic and private: a reader sees the whole file, and only the same user does."""
    data = record.encode() if isinstance(record, str) else msgspec.json.encode(record)
    write_whole(path, data, private=True)


def _read(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(_MAX_FILE_BYTES)


# --------------------------------------------------------------------------- the coordinator's side


class Door:
    """Where serving ranks ask; one per attempt. Another thread may call it, one call at a time."""

    def __init__(self, run_dir: Path, attempt: int) -> None:
        self.folder = folder(run_dir)
        self.token = secrets.token_hex(32)
        self._endpoint = Endpoint(protocol=PROTOCOL_VERSION, attempt=attempt, beats=0)
        self._seen: set[str] = set()

    def open(self) -> None:
        """Begin to take ranks; what an earlier attempt left is removed. Raises OSError."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        for old in self.folder.iterdir():
            old.unlink(missing_ok=True)
        _write(self.folder / "token", self.token)
        self.beat()

    def beat(self) -> None:
        self._endpoint = msgspec.structs.replace(self._endpoint, beats=self._endpoint.beats + 1)
        _write(self.folder / "endpoint.json", self._endpoint)

    def close(self) -> None:
        """No rank may ask any more."""
        (self.folder / "endpoint.json").unlink(missing_ok=True)

    def look(self) -> tuple[list[tuple[str, Ask | str]], list[str]]:
        """[(id, its ask or what is wrong with it)] and [id that connects], of those not returned
        yet."""
        paths = [p for p in sorted(self.folder.iterdir()) if p.suffix in (".asks", ".comes")]
        new = [path for path in paths if path.name not in self._seen]
        self._seen = {path.name for path in paths}
        asks = [(path.stem, self._check(path)) for path in new if path.suffix == ".asks"]
        return asks, [path.stem for path in new if path.suffix == ".comes"]

    def answer(
        self, id: str, worker: str = "", port: str = "", reason: str = "", temporary: bool = False
    ) -> None:
        """Admit it as `worker` at `port`, or refuse it with a reason."""
        if not worker:
            (self.folder / f"{id}.asks").unlink(missing_ok=True)
        answer = Answer(worker=worker, port=port, reason=reason, temporary=temporary)
        _write(self.folder / f"{id}.answer", answer)

    def forget(self, id: str) -> None:
        """It came, or will not: its files are of no more use."""
        for suffix in (".asks", ".answer", ".comes"):
            (self.folder / f"{id}{suffix}").unlink(missing_ok=True)

    def is_token(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self.token.encode())

    def _check(self, path: Path) -> Ask | str:
        """The ask, or what is wrong with it."""
        try:
            content = msgspec.json.decode(_read(path))
            protocol = content.get("protocol") if isinstance(content, dict) else None
            if protocol != PROTOCOL_VERSION:  # another version's ask may have other fields
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


# -------------------------------------------------------------------------- the serving rank's side


def endpoint(run_dir: Path) -> Endpoint | None:
    """That of the run's attempt, which may be dead; None without one. Raises `JoinError`."""
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
    """One rank's way in: `ask`, then `connect` with the answer."""

    def __init__(self, run_dir: Path) -> None:
        self.folder = folder(run_dir)
        self.id = uuid.uuid4().hex
        self.token = ""

    def ask(self, deadline_s: float) -> Answer:
        """Announce and wait. Raises `JoinError` when refused or not answered in `deadline_s`."""
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
        """The intercommunicator to the coordinator. Raises `JoinError` after `CONNECT_S`."""
        from mpi4py import MPI

        from rose.comm import mpi_process

        mpi_process.unname(MPI.COMM_WORLD)
        info = MPI.Info.Create()
        info.Set("timeout", str(CONNECT_S))
        MPI.COMM_SELF.Set_errhandler(MPI.ERRORS_RETURN)
        try:
            self._path("asks").rename(self._path("comes"))
            return self._connect(MPI, port, info)
        except (MPI.Exception, OSError) as error:
            words = " ".join(str(error).split())[:200]
            raise JoinError(
                f"{self.folder.parent}: no connection to its coordinator within {CONNECT_S} s "
                f"({words})",
                temporary=True,
            ) from None
        finally:
            self.withdraw()

    def _connect(self, MPI, port: str, info):
        """MPICH gives up while the network is still connecting, with the setting that keeps a send
        to a dead peer from hanging (conf/cluster/mpi)."""
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
