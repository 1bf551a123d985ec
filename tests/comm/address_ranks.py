"""A rank of two, in a network namespace of its own: address_ranks.py FOLDER RANK [INTERFACE
[ABSENT]].

The ranks gather through FOLDER, meet, and add their numbers up by DeepSpeed's world. ABSENT: that
rank leaves when the place is known, and the others wait for it a second only.
"""

import json
import os
import socket
import sys
import time
from pathlib import Path

from rose.comm import address

WORLD = 2
GATHER_S = 120.0


class Folder:
    """A collective gather through files."""

    def __init__(self, path: Path, rank: int) -> None:
        self.path, self.rank, self.rounds = path, rank, 0

    def __call__(self, text: str) -> list[str]:
        self.rounds += 1
        names = [self.path / f"{self.rounds}-{rank}" for rank in range(WORLD)]
        part = names[self.rank].with_suffix(".part")
        part.write_text(text)
        part.rename(names[self.rank])
        end = time.monotonic() + GATHER_S
        while not all(name.exists() for name in names):
            if time.monotonic() > end:
                raise TimeoutError(f"round {self.rounds} of the other rank")
            time.sleep(0.02)
        return [name.read_text() for name in names]


def main(folder: str, rank: int, interface: str | None = None, absent: str = "") -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    place = address.meet(Folder(Path(folder), rank), rank, interface)
    if absent == str(rank):
        return
    import torch

    from rose.trainer import deepspeed_engine
    from rose.trainer.trainer import _Peers

    if absent:
        deepspeed_engine.MEET_S = 1.0
    on_hosts = deepspeed_engine.join_world(torch.device("cpu"), rank, WORLD, place, 600.0)
    total = torch.tensor([rank + 1.0])
    torch.distributed.all_reduce(total)
    found = {"address": place.address, "interface": place.interface, "sum": float(total)}
    found["agreed"] = _Peers(rank, WORLD, on_hosts).sum(True)
    found["name_leads_to"] = socket.gethostbyname(socket.gethostname())
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
