"""Writes formulas on one line, as people type them: "R=82", "(a+b)/2", "10^6", "√(x)"."""

import re
from collections.abc import Sequence
from typing import Any, Final
from xml.etree.ElementTree import Element

_SIMPLE: Final = re.compile(r"[-+\u2212]?(\w|[.,](?=\w))*'*")
_INVISIBLE: Final = re.compile("[\u2061-\u2064\u200b\u2060]")
_MATH_LEAVES: Final = frozenset({"mi", "mn", "mo", "ms", "mtext"})
_MATH_LEFT_OUT: Final = frozenset({"annotation", "annotation-xml", "mphantom", "mspace"})
_MAX_DEPTH: Final = 100
_OFFICE_KINDS: Final = {
    "f": ("mfrac", "num", "den"),
    "sSup": ("msup", "e", "sup"),
    "sSub": ("msub", "e", "sub"),
    "sSubSup": ("msubsup", "e", "sub", "sup"),
    "limLow": ("munder", "e", "lim"),
    "limUpp": ("mover", "e", "lim"),
    "rad": ("mroot", "e", "deg"),
}
"""The element of MathML for one of Office MathML, and the elements in it that are its terms."""

_OFFICE_DEFAULTS: Final = {"begChr": "(", "endChr": ")", "sepChr": "|", "chr": "\u222b"}


def grouped(term: str) -> str:
    """Return a term in parentheses, unless it is a single number, word or sign."""
    return term if len(term) == 1 or _SIMPLE.fullmatch(term) else f"({term})"


def raised(text: str, before: str) -> str:
    """Return a superscript behind the text `before`: "^6" after "10", "me" in "Mme" and "st" in "1st", "[1]" as it is."""
    if not text or text.startswith(("[", "(")) or not before[-1:].strip():
        return text
    is_variable = before[-1].islower() and not before[-2:-1].isalpha()
    of_a_word = len(text) > 1 and text.isalpha() and not is_variable
    return text if of_a_word else f"^{grouped(text)}"


def lowered(text: str, before: str) -> str:
    """Return a subscript behind the text `before`: "2" after "H", "_2" after "10"."""
    return f"_{grouped(text)}" if text and before[-1:].isdigit() else text


def _built(kind: str, terms: Sequence[str]) -> str:
    """Join the terms of a formula's element; `kind` is its name in MathML."""
    first, second, third = (*terms, "", "", "")[:3]
    match kind:
        case "mfrac":
            return f"{grouped(first)}/{grouped(second)}"
        case "msup" | "mover":
            return f"{grouped(first)}^{grouped(second)}" if second else first
        case "msub" | "munder":
            return f"{grouped(first)}_{grouped(second)}" if second else first
        case "msubsup" | "munderover":
            return _built("msub", terms) + (f"^{grouped(third)}" if third else "")
        case "mroot":
            return f"{grouped(first)}^(1/{grouped(second)})" if second else f"\u221a({first})"
        case "msqrt":
            return f"\u221a({''.join(terms)})"
        case "mtr" | "mlabeledtr":
            return ", ".join(terms)
        case "mtable":
            return f"({'; '.join(terms)})"
    return "".join(terms)


def mathml_text(node: Any, depth: int = 0) -> str:
    """Return the formula of a `<math>` element of selectolax's tree."""
    if node.tag in _MATH_LEFT_OUT:
        return ""
    if node.tag in _MATH_LEAVES or depth > _MAX_DEPTH:
        return " ".join(_INVISIBLE.sub("", str(node.text())).split())
    return _built(str(node.tag), [mathml_text(each, depth + 1) for each in node.iter()])


def office_formula_text(element: Element, depth: int = 0) -> str:
    """Return the formula of an `<m:oMath>` element of a Word document or a slide (Office MathML, ISO/IEC 29500)."""
    name = element.tag.rpartition("}")[2]
    if name == "t":
        return element.text or ""
    if name.endswith("Pr") or depth > _MAX_DEPTH:
        return ""
    terms = [(each.tag.rpartition("}")[2], office_formula_text(each, depth + 1)) for each in element]
    parts, several = dict(terms), [text for _, text in terms]
    if name in _OFFICE_KINDS:
        kind, *names = _OFFICE_KINDS[name]
        return _built(kind, [parts.get(each, "") for each in names])
    match name:
        case "nary":
            limits = [parts.get(each, "") for each in ("sub", "sup")]
            return f"{_built('munderover', [_property(element, 'chr'), *limits])} {parts.get('e', '')}"
        case "d":
            inside = _property(element, "sepChr").join(text for name, text in terms if name == "e")
            return _property(element, "begChr") + inside + _property(element, "endChr")
        case "mr":
            return _built("mtr", several)
        case "m" | "eqArr":
            return _built("mtable", list(filter(None, several)))
    return "".join(several)


def _property(element: Element, name: str) -> str:
    """Return a sign that is set in an element's properties, such as its opening bracket, or the usual one."""
    found = element.find(f"./{{*}}{element.tag.rpartition('}')[2]}Pr/{{*}}{name}")
    if found is None:
        return _OFFICE_DEFAULTS[name]
    return next((value for key, value in found.attrib.items() if key.endswith("val")), "")
