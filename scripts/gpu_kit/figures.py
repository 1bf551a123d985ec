"""Turn what a stage brought back into rows of docs/results/*.csv, with the versions beside them.

    python scripts/gpu_kit/figures.py results.tar.gz [results.tar.gz ...] > docs/results/h200.csv

Each argument is the archive that one stage left in $OUT. Columns: check, figure, value, unit.
"""

from __future__ import annotations

import csv
import json
import sys
import tarfile


def rows(archive: str):
    """Yield (check, figure, value, unit) of every file of gpu_check's in a stage's archive."""
    with tarfile.open(archive) as tar:
        files = [member for member in tar if member.isfile() and member.name.endswith(".json")]
        found = {member.name: json.load(tar.extractfile(member)) for member in files}
    for _, told in sorted(found.items()):
        yield "versions", "the card", told["gpu"], ""
        yield from (("versions", name, version, "") for name, version in told["versions"].items())
        for check in told["checks"]:
            yield check["name"], "state", check["state"], ""
            for figure in check["figures"]:
                value = figure["value"]
                short = f"{value:.5g}" if isinstance(value, float) else value
                yield check["name"], figure["name"], short, figure["unit"]


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        raise SystemExit(__doc__)
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(("check", "figure", "value", "unit"))
    out.writerows(dict.fromkeys(row for archive in sys.argv[1:] for row in rows(archive)))


if __name__ == "__main__":
    main()
