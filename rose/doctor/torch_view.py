"""What torch makes of this machine's GPUs: `python -m rose.doctor.torch_view` says one event.

{"what": "torch", "version", "cuda": what it was built for or null, "count", "error": "" if it
computes on each, "no_peer": pairs that can't read each other's memory}. A process of its own, since
a broken driver can end it.
"""

from __future__ import annotations

import itertools

import torch

from rose.doctor.finding import say


def main() -> None:
    count, error, no_peer = 0, "", []
    if torch.version.cuda is not None:
        try:
            torch.cuda.init()
            count = torch.cuda.device_count()
            for index in range(count):
                torch.ones(2, device=f"cuda:{index}").sum().item()
            pairs = itertools.combinations(range(count), 2)
            no_peer = [p for p in pairs if not torch.cuda.can_device_access_peer(*p)]
        except RuntimeError as found:
            error = str(found).splitlines()[0]
        error = error or ("" if count else "it sees no GPU")
    version, cuda = torch.__version__, torch.version.cuda
    say("torch", version=version, cuda=cuda, count=count, error=error, no_peer=no_peer)


if __name__ == "__main__":
    main()
