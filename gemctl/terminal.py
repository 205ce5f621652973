"""Text for a terminal: text from files and users must not move the cursor, set titles, or change writing direction.

    shown("loss \\x1b]0;title\\x07")        # loss \\x1b]0;title\\x07, in visible characters

Colours are dropped, other control characters are escaped, credentials are masked.
"""

import re
import sys
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any

from gemctl.credentials import masked

if TYPE_CHECKING:
    from rich.console import Console

_COLOUR = re.compile(r"(?:\x1b\[|\x9b)[\d;:]*m")
_KEPT = "\n\t"
_CODES = [
    *range(0x20), *range(0x7F, 0xA0),
    0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A),  # line separators, and writing direction
]  # fmt: skip
_ESCAPED = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _CODES if chr(code) not in _KEPT}


def shown(text: str) -> str:
    """The text, safe to write to a terminal; line breaks and tabs stay."""
    return masked(_COLOUR.sub("", text).translate(_ESCAPED))


def console(file: IO[str], width: int | None = None) -> "Console":
    """A Rich console for text that may come from files: no escapes, no markup, no emoji codes."""
    from rich.console import Console  # noqa: PLC0415
    from rich.segment import Segment  # noqa: PLC0415

    class Plain(Console):
        def render(self, renderable: Any, options: Any = None) -> Iterator[Segment]:
            for part in super().render(renderable, options):
                yield part if part.control else Segment(shown(part.text), part.style)

    return Plain(file=file, width=width, soft_wrap=False, markup=False, emoji=False)


def note(text: str) -> None:
    """Writes a line to standard error."""
    print(shown(text), file=sys.stderr, flush=True)
