"""Policy versions on disk: immutable HDF5 files per trainer rank, committed by a manifest.

May import `rose.protocol` and `rose.config`; knows nothing of vLLM, MPI or the trainer.
"""

from rose.transfer.errors import TransferError
from rose.transfer.store import Version, VersionWriter, collect_garbage, commit, open_version, prepare

__all__ = ["TransferError", "Version", "VersionWriter", "collect_garbage", "commit", "open_version", "prepare"]
