"""Where GPU ranks keep compiled kernels: on a disk of their node.

vLLM, Triton, Inductor and FlashInfer compile at an engine's start and keep the result under $HOME.
Under Slurm that is one NFS folder for all engines at once, whose file locks and small files make a
start minutes longer.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rose.config import Cluster
from rose.files import own_folder

FOLDERS = {
    "VLLM_CACHE_ROOT": "vllm",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}


def variables(cluster: Cluster, given: Mapping[str, str]) -> dict[str, str]:
    """The variables of `FOLDERS` that are not `given`, under cluster.cache_dir, or under this
    node's TMPDIR in a Slurm job; none elsewhere, and none where the folder is somebody else's.
    Makes the folder, for this user alone."""
    if cluster.cache_dir is not None:
        home = Path(cluster.cache_dir).expanduser()
    elif cluster.kind == "slurm":
        home = Path(tempfile.gettempdir()) / f"rose-{os.getuid()}"
    else:
        return {}
    try:
        own_folder(home, follow=cluster.cache_dir is not None)
    except OSError:
        return {}
    return {name: str(home / folder) for name, folder in FOLDERS.items() if name not in given}
