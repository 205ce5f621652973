"""Number types that the configuration's dataclasses share."""

from typing import Annotated

from pydantic import ConfigDict, Field

INT64_MAX = 2**63 - 1  # integers end up in int64 tensors
FORBID = ConfigDict(extra="forbid")
Positive = Annotated[int, Field(ge=1, le=INT64_MAX)]
NonNegative = Annotated[int, Field(ge=0, le=INT64_MAX)]
Size = Annotated[int, Field(ge=1, le=2**24)]  # one dimension: the product of two stays far below 2^63
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
