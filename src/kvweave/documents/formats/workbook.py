"""Finds the formulas of an Excel workbook whose results are not stored in it.

A program that writes a workbook without computing it leaves results out, or writes 0 and asks to compute all on loading.
"""

import html
import io
import posixpath
import re
import zipfile
from typing import Final
from xml.etree import ElementTree

_WORKBOOK: Final = "xl/workbook.xml"
_RELATIONS: Final = "xl/_rels/workbook.xml.rels"
_FORMULA: Final = re.compile(
    rb"<(?:\w+:)?c\b([^<>]*)>\s*<(?:\w+:)?f\b[^<>]*(?:/>|>([^<]*)</(?:\w+:)?f>)"
    rb"\s*(?:<(?:\w+:)?v\s*(?:/>|>([^<]*)</(?:\w+:)?v>))?"
)
_REFERENCE: Final = re.compile(rb"""\br\s*=\s*["']([A-Z]{1,3})([0-9]{1,7})["']""")


class UncomputedFormulas:
    """The formulas without results, by sheet. A damaged part of the workbook counts as having none."""

    def __init__(self, data: bytes) -> None:
        self._archive = zipfile.ZipFile(io.BytesIO(data))
        self._parts: dict[str, str] = {}
        self._zero_counts = True
        try:
            book = ElementTree.fromstring(self._archive.read(_WORKBOOK))
            relations = ElementTree.fromstring(self._archive.read(_RELATIONS))
        except (KeyError, ElementTree.ParseError):
            return
        targets = {each.get("Id"): each.get("Target", "") for each in relations}
        for sheet in book.iterfind("./{*}sheets/{*}sheet"):
            identity = next((value for key, value in sheet.attrib.items() if key.endswith("}id")), "")
            self._parts[sheet.get("name", "")] = posixpath.join("/xl", targets.get(identity, "")).lstrip("/")
        settings = book.find("./{*}calcPr")
        self._zero_counts = settings is None or settings.get("fullCalcOnLoad") not in ("1", "true")

    def of_sheet(self, name: str) -> dict[tuple[int, int], str]:
        """Return the formulas of a sheet, such as "=B2*C2", by row and column from 0; "=" for a part of a shared formula."""
        try:
            part = self._archive.read(self._parts.get(name, ""))
        except KeyError:
            return {}
        found = {}
        for cell in _FORMULA.finditer(part):
            place = _REFERENCE.search(cell[1])
            if place and (not cell[3] or (cell[3] == b"0" and not self._zero_counts)):
                formula = html.unescape((cell[2] or b"").decode("utf-8", "replace"))
                found[int(place[2]) - 1, _column(place[1])] = f"={formula}"
        return found


def _column(letters: bytes) -> int:
    """Return the number of a column, from 0: "A" is 0, "AB" is 27."""
    number = 0
    for letter in letters:
        number = number * 26 + letter - ord("A") + 1
    return number - 1
