"""Text for a terminal: what comes from files and users may not move the cursor, set titles, or stand in another order.

    shown("loss \\x1b]0;title\\x07")        # loss \\x1b]0;title\\x07, in visible characters

Colours are dropped, other control characters are escaped, credentials are masked.
"""

import re

from gemctl.credentials import masked

_COLOUR = re.compile(r"(?:\x1b\[|\x9b)[\d;:]*m")
_KEPT = "\n\t"
_CODES = [
    *range(0x20), *range(0x7F, 0xA0),
    0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A),  # lines, and the direction of writing
]  # fmt: skip
_ESCAPED = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _CODES if chr(code) not in _KEPT}


def shown(text: str) -> str:
    """The text as it may be written to a terminal; lines and tabs stay."""
    return masked(_COLOUR.sub("", text).translate(_ESCAPED))
