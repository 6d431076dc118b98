"""Makes an element of a page of an SVG document that Matplotlib wrote: themed, small, with ids of its own."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from itertools import count
from xml.etree import ElementTree as ET

TAG, KEY, _APART = "tag:", "key:", "\N{INVISIBLE SEPARATOR}"
"""What the id of a drawn thing begins with that has words or a series, that of a legend's entry; and what
parts both: no printable text holds it."""

_SVG, _HREF = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
_NUMBER = re.compile(r"-?\d+\.\d+")
_GEOMETRY = ("d", "points", "transform", "x", "y", "width", "height")
_REFERENCE = re.compile(r"#([\w-]+)")

_MANY = 9
"""Equal marks that are worth a path of their own."""


def printable(text: str) -> str:
    """Drop characters that a drawing cannot hold: XML has no way to write control characters."""
    return "".join(c for c in text if c.isprintable())


def tag(words: str = "", series: str = "") -> str:
    """Return the id of a drawn thing: what the page says to who points at it, and its entry in the legend."""
    return f"{TAG}{printable(words)}{_APART}{printable(series)}"


def inline(raw: str, key: str, alt: str, colours: Mapping[str, str]) -> str:
    """Return the document `raw` as one `<svg>` element.

    Args:
        raw: as Matplotlib wrote it.
        key: what its ids begin with; unique on the page.
        alt: what it shows.
        colours: as they stand in `raw`, by the page's variable that takes their place.
    """
    root = ET.fromstring(raw)  # noqa: S314 - written by matplotlib a moment ago, not by a stranger
    for parent in list(root.iter()):
        for child in [c for c in parent if c.tag in {f"{_SVG}metadata", f"{_SVG}style"}]:
            parent.remove(child)
    classes: dict[str, str] = {}
    for element in root.iter():
        element.tag = element.tag.removeprefix(_SVG)
        element.text = (element.text or "").strip() or None
        element.tail = None
        if _HREF in element.attrib:
            element.set("href", element.attrib.pop(_HREF))
        _shorten(element)
        _tell(element)
        if style := _themed(element, colours):
            name = classes.setdefault(style, f"s{zlib.crc32(style.encode()):x}")
            element.set("class", " ".join(filter(None, (element.get("class"), name))))
    for group in list(root.iter("g")):
        _merge_marks(group)
    _rename(root, key, classes)
    _prune(root)
    for name in ("width", "height", "version"):
        del root.attrib[name]
    root.attrib |= {"role": "img", "aria-label": alt}
    sheet = ET.Element("style")
    sheet.text = "".join(f".{name}{{{style}}}" for style, name in classes.items())
    root.insert(0, sheet)
    return ET.tostring(root, encoding="unicode")


def _shorten(element: ET.Element) -> None:
    """Write a hundredth of a point at most, and no turn by nothing."""
    own = element.attrib
    for name in own.keys() & set(_GEOMETRY):
        short = _NUMBER.sub(lambda found: f"{round(float(found[0]), 2) + 0.0:g}", own[name])
        own[name] = re.sub(r" *([A-Za-z]) *", r"\1", short).strip() if name == "d" else short
    if own.get("transform", "").startswith("rotate(-0 "):
        del own["transform"]


def _tell(element: ET.Element) -> None:
    """Give a drawn thing its words, for who points at it, and its series."""
    own, name = element.attrib, element.get("id", "")
    if name.startswith(KEY):
        own["data-key"] = own.pop("id").removeprefix(KEY)
    elif name.startswith(TAG):
        words, _, series = own.pop("id").removeprefix(TAG).partition(_APART)
        own |= {"data-series": series} if series else {}
        if words:
            own["class"] = "tip"
            title = ET.Element("title")
            title.text = words
            element.insert(0, title)


def _themed(element: ET.Element, colours: Mapping[str, str]) -> str:
    """Take the element's style and return it, in the page's colours and without fonts."""
    own = element.attrib
    # The paint of hatches stands in attributes, where the page's variables do not apply.
    paint = [f"{name}: {own.pop(name)}" for name in ("fill", "stroke") if name in own]
    parts = [*paint, *own.pop("style", "").split("; ")]
    style = ";".join(part.replace(": ", ":") for part in parts if not part.startswith("font-family"))
    for name, colour in colours.items():
        style = style.replace(colour, f"var(--{name})")
    return style.strip(";")


def _merge_marks(group: ET.Element) -> None:
    """Make many equal marks those of one path."""
    marks = list(group)
    alike = {(mark.tag, mark.get("href"), mark.get("class")) for mark in marks}
    if len(marks) < _MANY or len(alike) > 1 or marks[0].tag != "use":
        return
    mark = marks[0]
    name = f"{mark.get('href', '')[1:]}-{mark.get('class')}"
    points = " ".join(f"{one.get('x')},{one.get('y')}" for one in marks)
    for part in ("x", "y"):
        del mark.attrib[part]
    marker = ET.Element("marker", id=name, overflow="visible", markerUnits="userSpaceOnUse")
    marker.append(mark)
    path = {f"marker-{place}": f"url(#{name})" for place in ("start", "mid", "end")}
    group[:] = [marker, ET.Element("polyline", path | {"points": points, "fill": "none"})]


def _rename(root: ET.Element, key: str, classes: dict[str, str]) -> None:
    """Give what something refers to short ids of this figure, and take away all others."""
    said = [*classes, *(value for element in root.iter() for value in element.attrib.values())]
    used = {name for value in said for name in _REFERENCE.findall(value)}
    number = count()
    names = {}
    for element in root.iter():
        name = element.attrib.pop("id", "")
        if name in used:
            names[name] = f"{key}-{next(number)}"
            element.set("id", names[name])

    def renamed(value: str) -> str:
        return _REFERENCE.sub(lambda found: f"#{names.get(found[1], found[1])}", value)

    for own in (element.attrib for element in root.iter()):
        own |= {name: renamed(value) for name, value in own.items() if "#" in value}
    for style in [style for style in classes if "#" in style]:
        classes[renamed(style)] = classes.pop(style)


def _prune(parent: ET.Element) -> None:
    """Take out empty groups, and put in place of groups without a meaning what they hold."""
    kept: list[ET.Element] = []
    for child in parent:
        _prune(child)
        if child.tag in {"g", "defs"} and not len(child):
            continue
        kept += list(child) if child.tag == "g" and not child.attrib else [child]
    parent[:] = kept
