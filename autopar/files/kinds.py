"""What may stand in files: texts and numbers, with their ranges and their meanings (`typed`)."""

import sys
from typing import Annotated

from msgspec import Meta

MOST = 2**63 - 1
"""The largest integer that files may hold."""

NUMBER_MOST = sys.float_info.max

Text = Annotated[str, Meta(pattern=r"^[^\ud800-\udfff]*$", description="a text in Unicode")]
Name = Annotated[str, Meta(pattern=r"\S", description="a text that is not empty")]
Count = Annotated[int, Meta(ge=0, le=MOST, description="an integer, at least 0")]
Size = Annotated[int, Meta(ge=1, le=MOST, description="an integer, at least 1")]
Amount = Annotated[float, Meta(ge=0, le=NUMBER_MOST, description="a number, 0 or more")]
Seconds = Annotated[float, Meta(ge=0, le=NUMBER_MOST, description="a number of seconds, 0 or more")]
Rate = Annotated[float, Meta(gt=0, le=NUMBER_MOST, description="a number above 0")]
Part = Annotated[float, Meta(gt=0, le=1, description="a part above 0 and at most 1")]
Share = Annotated[float, Meta(ge=0, le=1, description="a part from 0 to 1")]

NEEDED_IN_FILES, NOT_IN_FILES = {"in files": True}, {"in files": False}
"""The `metadata` of a field with a default that a file must give, and of one that no file gives."""
