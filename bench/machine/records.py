"""Parts of every JSON file of ours: records, and numbers within bounds."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

Count: TypeAlias = Annotated[int, Meta(ge=0, le=10**15)]
Amount: TypeAlias = Annotated[float, Meta(ge=0, le=1e15)]
Limit: TypeAlias = Amount | Literal["unlimited"]


class Record(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """An object of a JSON file of ours."""
