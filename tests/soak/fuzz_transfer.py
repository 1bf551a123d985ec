"""Weight transfer under damage: a reader reaches exactly the right weights, or says what is
missing.

    python tests/soak/fuzz_transfer.py                                  # all parts, some minutes on one core
    python tests/soak/fuzz_transfer.py --part kills --kills 500 --seed 7
    python tests/soak/fuzz_transfer.py --part bytes --every 50          # each 50th byte only, and each
                                                                        # 800th size of a full disk

bytes   every byte that a reader takes of three edges (full, from-initial, delta) flipped, one at a time; files cut,
        lengthened, exchanged, of another lineage. With other routes the reader must take one, and
        with none it must fail and name the file or the block. A sample of it through a relay.
kills   writers (two processes) and readers are SIGKILLed at random moments: what is committed is whole and right, live
        weights are the old version or the new one. Then collector and readers at once, for
        `--seconds`.
routes  late joiners, gaps, a wrong base, an older version, a store replaced by another attempt's.
disk    files may not grow beyond a limit, every limit; as root also a disk of 256 KiB.

The weights of a version follow from the seed and its number (`History`), so nothing has to be
remembered across a kill. Exit code 1, and what is needed to see it again, if something does not
hold. Left out: machines that lose power (files are synced before they are renamed, which no test
here can tell).
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch
from fuzz_transfer_bytes import bytes_part
from fuzz_transfer_disk import disk_part
from fuzz_transfer_kills import collected_meanwhile, killed_readers, killed_writers
from fuzz_transfer_routes import routes_part
from fuzz_transfer_world import Tally

from rose.transfer import codec
from scripts.harness import flagged

PARTS = ("bytes", "kills", "routes", "disk")


def main(arguments: list[str] | None = None) -> int:
    counts = {"every": 1, "kills": 100, "seconds": 20.0, "gaps": 40}
    seed = int(time.time()) % 10**6
    options = flagged(__doc__, arguments, part=list(PARTS), **counts, seed=seed)
    print(f"seed {options.seed}", flush=True)
    torch.set_num_threads(1)
    codec.compile_all()
    failed = False
    for part in options.part:
        tally, began = Tally(), time.monotonic()
        with tempfile.TemporaryDirectory(prefix="fuzz-transfer-") as name:
            folder = Path(name)
            if part == "bytes":
                bytes_part(folder, options.seed, options.every, tally)
            elif part == "kills":
                killed_writers(folder, options.seed, options.kills, tally)
                killed_readers(folder, options.seed, options.kills, tally)
                collected_meanwhile(folder, options.seed, options.seconds, tally)
            elif part == "routes":
                routes_part(folder, options.seed, options.gaps, tally)
            else:
                disk_part(folder, options.seed, 16 * options.every, tally)
        wrong, took = f"{len(tally.violations)} violations", time.monotonic() - began
        print(f"{part}: {tally}, {wrong}, {took:.0f} s", flush=True)
        failed |= bool(tally.violations)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
