"""MPI between ranks: bytes on the wire, one mailbox per rank, the first handshake.

May import `rose.protocol`. Knows nothing of what messages mean.
"""
