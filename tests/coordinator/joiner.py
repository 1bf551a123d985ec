"""A serving rank without an engine, for tests: `python joiner.py RUN_DIR BEHAVIOUR`. Real door,
real MPI, real porter."""

import os
import sys
import time
from pathlib import Path

import msgspec

from rose import protocol as p
from rose.comm import join
from rose.comm.wire import encode


def main(run_dir: Path, behaviour: str) -> None:
    application = join.Application(run_dir)
    try:
        answer = application.ask(120.0)
    except join.JoinError as error:
        print(f"refused: {error}", flush=True)
        os._exit(3)
    if behaviour == "dies after announcing":
        os._exit(9)
    if behaviour == "dies before connecting":
        application._path("asks").rename(application._path("comes"))
        os._exit(9)
    from rose.comm.link import Link

    link = Link(application.connect(answer.port))

    def say(*messages: p.Message | bytes) -> None:
        for message in messages:
            link.send(message if isinstance(message, bytes) else encode(message))

    hello = p.JoinHello(application.token, answer.worker)
    ready = p.WorkerReady(answer.worker, 1, os.getpid(), 4, 10_000, 0)
    match behaviour:
        case "wrong token over MPI":
            say(msgspec.structs.replace(hello, token="0" * 64))
        case "garbage over MPI":
            say(b"GET / HTTP/1.1\r\n\r\n")
        case "garbage after hello":
            say(hello, ready, b"\xff" * 1000)
        case "old version over MPI":
            say(encode(hello)[:4] + b"\x01\x00" + encode(hello)[6:])
        case "says nothing":
            pass
        case "speaks for another":
            say(hello, msgspec.structs.replace(ready, worker="rollout-0"))
        case "tells the run to fail":
            say(hello, ready, p.RankFailed(0, "I say so"))
        case "impossible engine":
            say(hello, msgspec.structs.replace(ready, kv_tokens=0))
        case "impossible capacity":
            say(hello, ready, p.WorkerCapacity(answer.worker, 1, -5, 4, -1.0, False))
        case "wrong tokens" | "works" | "gives back":
            say(hello, ready)
    beats = time.monotonic()
    while True:
        data = link.take()
        message = msgspec.msgpack.decode(data[12:]) if data else None
        if message and message["type"] == "Shutdown":
            print(message["reason"], flush=True)
            os._exit(0)
        if message and message["type"] == "GenerateTurn":
            tokens = [5] * 3 if behaviour != "wrong tokens" else [5] * 1000
            packed = p.pack_tokens(tokens), p.pack_floats([-1.0] * len(tokens))
            say(p.TurnProgress(message["turn"], message["attempt"], *packed, 0))
            if behaviour == "gives back":
                packed = p.pack_tokens([6]), p.pack_floats([-1.0])
                back = p.TurnReturned(message["turn"], message["attempt"], *packed, 0, "test")
                say(back, p.WorkerCapacity(answer.worker, 1, 0, 0, 2.0, True))
        if time.monotonic() - beats > 0.3:
            beats = time.monotonic()
            say(p.WorkerLoad(answer.worker, 1, 0, 0, 0.0, 0, 0, 0))
        time.sleep(0.005)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
