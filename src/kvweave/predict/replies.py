"""Questions in what a model wrote: one a line, whatever it put around them."""

import re
from typing import Final

from kvweave.predict.screening import WORDS

_BULLET: Final = re.compile(r"^\s*(?:[-*•–]+|\(?\d{1,2}[.):]|[Qq](?:uestion)?\s*\d{0,2}\s*[.:)])\s*")
_AROUND: Final = " \t\"'*_`“”‘’"
_FEWEST, _MOST = 3, 40  # words of a question


def questions_in(reply: str, most: int) -> list[str]:
    """The questions of a reply in order, each once, without bullets, numbers and quotes; what is no question is left out."""
    found: dict[str, str] = {}
    for line in reply.splitlines():
        text = _BULLET.sub("", line, count=1).strip(_AROUND)
        end = text.find("?")
        question = " ".join(text[: end + 1].split())
        if end >= 0 and _FEWEST <= len(WORDS.findall(question)) <= _MOST:
            found.setdefault(question.casefold(), question)
    return list(found.values())[:most]
