"""SVG elements as text, and about how wide a text is.

Laws. Text is escaped here, so a name is never markup. Places have tenths of a pixel. The same input gives the
same bytes. Colours stand in attributes, for a picture that stands alone; the style of a page overrides them by class.
"""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Sequence

Point = tuple[float, float]

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
INK, SOFT, AXIS, GRID = "#1f2328", "#57606a", "#8c959f", "#e7eaee"
_EMS = dict.fromkeys("ijltfrI.,:;'|!()[]/ ", 0.42) | dict.fromkeys("mwMW@%", 1.06)  # widths of unusual letters


def text_width(text: str, size: float) -> float:
    """About how many pixels the text takes, in the wider ones of the usual fonts, in bold."""
    wide = (1.05 if unicodedata.east_asian_width(c) in "WF" else 0.8 if c.isupper() else 0.7 for c in text)
    return size * sum(_EMS.get(letter, em) for letter, em in zip(text, wide, strict=True))


def clean(text: str) -> str:
    """One line of what XML allows."""
    line = " ".join(text.split())
    return "".join("\ufffd" if unicodedata.category(c) in ("Cc", "Cs") or c in "\ufffe\uffff" else c for c in line)


def shorten(text: str, letters: int) -> str:
    return text if len(text) <= letters else text[: letters - 1].rstrip() + "…"


def fit(text: str, size: float, room: float) -> str:
    """The text, shortened until it fits."""
    letters = min(len(text), 200)
    while letters > 1 and text_width(shorten(text, letters), size) > room:
        letters -= 1
    return shorten(text, letters)


def element(name: str, content: str = "", /, **attributes: object) -> str:
    """One element. The content is markup, already escaped; attributes are escaped here, and left out if None.

    An underscore in a name stands for a dash, and one at its end for none: `class_` is `class`.
    """
    written = ""
    for key, value in attributes.items():
        text = place(value) if isinstance(value, float) else str(value)
        written += "" if value is None else f' {key.rstrip("_").replace("_", "-")}="{html.escape(text)}"'
    return f"<{name}{written}>{content}</{name}>\n" if content else f"<{name}{written}/>\n"


def group(name: str, *items: str, **style: object) -> str:
    """The items under a class that says what they are; nothing for no items."""
    content = "".join(items)
    return element("g", "\n" + content, class_=name, **style) if content else ""


def label(x: float, y: float, text: str, size: float, whole: str = "", **style: object) -> str:
    """Text whose middle is at the height `y`; nothing for no text. What did not fit whole is shown at the pointer."""
    more = element("title", html.escape(shorten(clean(whole), 300))) if whole and whole != text else ""
    text = clean(text)
    return element("text", html.escape(text) + more, x=x, y=y + 0.35 * size, font_size=size, **style) if text else ""


def stroke(start: Point, end: Point, **style: object) -> str:
    return element("line", x1=start[0], y1=start[1], x2=end[0], y2=end[1], **style)


def polyline(points: Sequence[Point], **style: object) -> str:
    return element("polyline", points=" ".join(f"{place(x)},{place(y)}" for x, y in points), **style)


def place(value: float) -> str:
    """A length or place: tenths of a pixel are enough. Adding zero turns minus zero into zero."""
    return f"{round(value, 1) + 0.0:.1f}".removesuffix(".0")
