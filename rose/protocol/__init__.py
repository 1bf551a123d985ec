"""All messages between processes, and the records that they carry.

Imports nothing of ROSE. Per-token data travels as packed little-endian bytes (int32 tokens, float32
log-probabilities), so that a process that only forwards it never decodes it. `rose.comm.wire` has
the encoding, the version check and the size limits.

Ids are strings and stable across restarts: group ``g12`` (``e3`` in held-out evaluation), a second
attempt at the group's prompt ``g12r1``, trajectory ``g12.5``, its replacement after an environment
failure ``g12.5r1``, turn ``g12.5.t2``.

`hosts` has the messages of environment hosts and reward ranks, `workers` those of rollout workers,
`trainers` those of trainer ranks, and `common` the others. Import every name from here.
"""

import functools
import operator

from rose.protocol.common import *  # noqa: F403
from rose.protocol.common import Message
from rose.protocol.hosts import *  # noqa: F403
from rose.protocol.trainers import *  # noqa: F403
from rose.protocol.workers import *  # noqa: F403

AnyMessage = functools.reduce(operator.or_, Message.__subclasses__())  # the decoder's type
