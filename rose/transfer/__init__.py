"""Transfer policy versions from the trainer's shards to the engines' live weights, bit-exactly and
with few bytes (docs/format.md).

    blocks, codec (payload, rice)    what is sent: the differences of blocks, encoded
    store, edge, source              the files that hold them (an edge leads from version to version)
    publish                          the trainer's side
    base                             the frozen weights below an adapter, which are not sent
    receive, stage, changes, live    the reader's side: choose the edges to a version, write the live weights
    broadcast, mirror                the same files by MPI or NCCL, into the nodes' memory

May import `rose.protocol`, `rose.config` and `rose.files`, but not vLLM, DeepSpeed or the ranks.
"""  # noqa: E501

from rose.transfer.errors import Corrupted, Missing, TransferError

__all__ = ["Corrupted", "Missing", "TransferError"]
