"""A host of sandboxes that waits to be killed: prints its keeper's pid, then the number of sandboxes
that it has begun.

    python tests/parts/sandbox/killed.py MARK        an argument of each sandbox's background process
"""

import asyncio
import sys

from rose.parts.sandbox import Sandbox, Spec
from rose.parts.sandbox.probe import keeper


async def main() -> None:
    boxes = [await Sandbox.start(Spec(), "namespaces") for _ in range(3)]
    for box in boxes:
        begin = f"exec -a {sys.argv[1]} sleep 100000"
        await box.run(f"({begin}) & setsid bash -c '{begin}' &", 60)
    print(keeper().process.pid, len(boxes), flush=True)
    await asyncio.sleep(600)


asyncio.run(main())
