"""Types of hyper-parameters: what `build` checks against, beside the type itself."""

from __future__ import annotations

from typing import Annotated

import msgspec

NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
# a ratio is positive: 1 - clip_low must be too
ClipLow = Annotated[float, msgspec.Meta(ge=0, lt=1)]
Count = Annotated[int, msgspec.Meta(ge=1)]
CountOrZero = Annotated[int, msgspec.Meta(ge=0)]
