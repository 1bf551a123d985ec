"""MPI between ranks: bytes on the wire, one mailbox per rank, the first handshake. May import
`rose.protocol`; knows nothing of what messages mean."""
