"""Policy versions: from the trainer's shards to the engines' live weights, exactly, and with few
bytes (docs/format.md).

    blocks, codec (payload, rice)                   what is sent: differences of blocks as bytes
    store, edge, source                             where it lies, and how it is read
    publish                                         the trainer's side
    base                                            what lies below an adapter and doesn't travel
    receive, stage, changes, live                   the reader's side: by which edges to a version, and into the weights
    broadcast, mirror, relay                        other ways for the same bytes than a shared folder

May import `rose.protocol`, `rose.config` and `rose.files`; knows nothing of vLLM, DeepSpeed or
the roles.
"""  # noqa: E501

from rose.transfer.errors import Corrupted, Missing, TransferError

__all__ = ["Corrupted", "Missing", "TransferError"]
