"""Reads e-mails (.eml) and mailboxes (.mbox) with the standard library.

Sender, date and subject are repeated with every chunk. Attachments become documents. If an e-mail is indexed itself, what replies
quote of it is left out (`mail_quotes`).
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from email import message_from_bytes
from email.header import decode_header, make_header
from email.message import Message
from email.parser import BytesHeaderParser
from email.policy import compat32
from pathlib import Path
from typing import Final

from kvweave.documents.encodings import decode, decode_as
from kvweave.documents.extracted import Attachment, Extracted, ReadContext, TextBuilder, clean, damaged
from kvweave.documents.files import content_suffix
from kvweave.documents.formats.mail_quotes import QuotedMail, without_quotes, words_of
from kvweave.documents.html import Extent, HtmlText, read_html
from kvweave.errors import UnreadableDocument

_FROM_LINE: Final = re.compile(
    rb"(?:\A|\n\r?\n)From (?:(?<=\AFrom )[^\n]*|[^\s]+\s*?|[^\n]*\d:\d\d[^\n]*)\n(?=[!-9;-~]+:|>From )"
)
"""The line before a message: it has one word or a time, and the message's header follows. A paragraph may begin with "From" too."""

_ESCAPED_FROM: Final = re.compile(rb"^>(>*From )", re.MULTILINE)
_MESSAGE_ID: Final = re.compile(r"<[^<>\s]+>")
_ENCRYPTED: Final = frozenset({"multipart/encrypted", "application/pkcs7-mime", "application/x-pkcs7-mime"})
_HEADER_BYTES: Final = 1 << 16
_MAX_PARTS: Final = 1000
_MAX_DEPTH: Final = 50
_MAX_QUOTED: Final = 10
"""How many of the e-mails that a reply names are searched for what it quotes."""

_MAX_KEPT: Final = 100
_SAME_SHARE: Final = 0.6
"""The plain text of an e-mail with at least this share of the words of its HTML says the same."""


@damaged("e-mail")
def read_mail(data: bytes, ctx: ReadContext) -> Extracted:
    """Read one e-mail; raises UnreadableDocument if it is encrypted or damaged, or if the file is not an e-mail."""
    message = message_from_bytes(data.lstrip(), policy=compat32)
    if not message.keys() or not any(message.get(name) for name in ("From", "Date", "Subject", "Received")):
        raise UnreadableDocument("no e-mail: it has no sender, date or subject")
    if message.get_content_type() in _ENCRYPTED:
        raise UnreadableDocument("encrypted e-mail; save a decrypted copy")
    built = TextBuilder()
    read = _add_message(built, message, _Known(ctx.known_messages))
    return _extracted(built, _header(message, "Subject"), read.attachments(), read.notes)


@damaged("mailbox")
def read_mailbox(data: bytes, ctx: ReadContext) -> Extracted:
    """Read the messages of a mailbox in order. The name of an attachment begins with the number of its message."""
    messages = [message_from_bytes(each, policy=compat32) for each in _messages(data)]
    if not data.startswith(b"From ") or not messages:
        raise UnreadableDocument('no mailbox: it does not begin with "From " and a message')
    known = _Known(ctx.known_messages, messages)
    built, attachments, notes = TextBuilder(), list[Attachment](), list[str]()
    for number, message in enumerate(messages, 1):
        read = _add_message(built, message, known)
        attachments += [Attachment(f"{number:04d} {each.name}", each.data) for each in read.attachments()]
        notes += read.notes
        ctx.alive()
    if encrypted := sum(each.get_content_type() in _ENCRYPTED for each in messages):
        notes.append(f"{encrypted} of {len(messages)} messages are encrypted")
    return _extracted(built, "", attachments, notes)


def _extracted(
    built: TextBuilder, title: str, attachments: Sequence[Attachment], notes: Sequence[str]
) -> Extracted:
    sections, once = tuple(built.sections), tuple(dict.fromkeys(notes))
    return Extracted(built.text(), title, sections, once, attachments=tuple(attachments))


def _messages(data: bytes) -> Iterator[bytes]:
    # The standard library's mailbox.mbox needs a file on disk, and this mailbox may be an attachment or compressed.
    bounds = [(each.start(), each.end()) for each in _FROM_LINE.finditer(data)]
    ends = [start for start, _ in bounds[1:]] + [len(data)][: len(bounds)]
    for (_, start), end in zip(bounds, ends, strict=True):
        yield _ESCAPED_FROM.sub(rb"\1", data[start:end])


def message_ids(paths: Iterable[Path]) -> dict[str, Path]:
    """Return the ids of the e-mails in these files, each with its file; skip mailboxes and files that cannot be read."""
    found: dict[str, Path] = {}
    for path in paths:
        if content_suffix(path.name) == ".mbox":
            continue
        with suppress(OSError), open(path, "rb") as stream:
            # The header alone: parts nested by hundreds are deeper than Python's stack.
            message = BytesHeaderParser(policy=compat32).parsebytes(stream.read(_HEADER_BYTES).lstrip())
            if identity := _id(message):
                found.setdefault(identity, path)
    return found


def _id(message: Message) -> str:
    return next(iter(_MESSAGE_ID.findall(str(message.get("Message-ID", "")))), "")


class _Known:
    """The e-mails that are indexed: those in files of their own, and those of the mailbox that is read."""

    def __init__(self, files: Mapping[str, Path], messages: Sequence[Message] = ()) -> None:
        self._files = files
        self._messages = {_id(each): each for each in messages}
        self._read = dict[str, QuotedMail]()

    def quoted_by(self, message: Message) -> list[QuotedMail]:
        """Return the indexed e-mails that this one answers, the nearest first."""
        answered = _MESSAGE_ID.findall(str(message.get("In-Reply-To", "")))
        earlier = _MESSAGE_ID.findall(str(message.get("References", "")))
        ids = list(dict.fromkeys([*answered, *reversed(earlier)]))[:_MAX_QUOTED]
        own = _id(message)
        return [found for each in ids if each != own and (found := self._mail(each)) is not None]

    def _mail(self, identity: str) -> QuotedMail | None:
        if identity not in self._read:
            message = self._messages.get(identity) or self._stored(identity)
            if message is None:
                return None
            if len(self._read) >= _MAX_KEPT:
                self._read.clear()
            sender, date = _header(message, "From"), _header(message, "Date")
            text = _Body().read(message).text
            self._read[identity] = QuotedMail(sender, date, text)
        return self._read[identity]

    def _stored(self, identity: str) -> Message | None:
        with suppress(KeyError, OSError):
            return message_from_bytes(self._files[identity].read_bytes().lstrip(), policy=compat32)
        return None


# One message


def _header(message: Message, name: str) -> str:
    raw = message.get(name)
    if raw is None:
        return ""
    text = _decoded_words(str(raw))
    if any("\udc80" <= each <= "\udcff" for each in text):  # bytes without a declared encoding
        text = decode(text.encode("utf-8", "surrogateescape")).text
    return " ".join(text.split())


def _decoded_words(text: str) -> str:
    """Decode the words of a header that are written as "=?utf-8?q?...?="."""
    try:
        parts = decode_header(text)
        return str(
            make_header([(decode_as(part, name), "utf-8") if name else (part, name) for part, name in parts])
        )
    except (LookupError, ValueError, UnicodeError):
        return text


class _Body:
    """Reads the parts of one message that are shown, and collects the others."""

    def __init__(self) -> None:
        self._attached: list[Message] = []
        self.notes: list[str] = []
        self._parts = 0

    def read(self, part: Message, depth: int = 0) -> HtmlText:
        """Return the text of a part; an attached e-mail is an attachment."""
        self._parts += 1
        if self._parts > _MAX_PARTS or depth > _MAX_DEPTH:
            return HtmlText("", "")
        kind, name, inside = part.get_content_type(), _file_name(part), part.get_payload()
        if part.is_multipart() and kind != "message/rfc822" and isinstance(inside, list):
            parts = [each for each in inside if isinstance(each, Message)]
            pages = [self.read(each, depth + 1) for each in parts]
            if kind == "multipart/alternative":
                pages = _best(
                    [(each.get_content_type(), page) for each, page in zip(parts, pages, strict=True)]
                )
            return _joined(pages)
        if part.get_content_disposition() == "attachment" or name or kind not in ("text/plain", "text/html"):
            self._attached.append(part)
            return HtmlText("", "")
        text, note = _text(part)
        self.notes += [note] if note else []
        return read_html(text) if kind == "text/html" else HtmlText(text.lstrip(), "")

    def attachments(self) -> list[Attachment]:
        """Return the attachments, decoded only now: those of an e-mail that a reply quotes are not needed."""
        return [found for part in self._attached if (found := _attachment(part)) is not None]


def _add_message(built: TextBuilder, message: Message, known: _Known) -> _Body:
    """Append a message as a section; return its body for the attachments and notes."""
    subject = _header(message, "Subject")
    named = ((name, _header(message, name)) for name in ("From", "Date", "Subject"))
    head = clean("".join(f"{name}: {value}\n" for name, value in named if value)) + "\n"
    built.mark(heading=(subject,) if subject else (), head=head)
    receivers = _header(message, "To")
    body = _Body()
    page = body.read(message)
    own = without_quotes(page.text, page.quotes, known.quoted_by(message))
    sections = page.sections if own == page.text else ()  # their offsets are no longer right
    built.add(head + (f"To: {receivers[:500]}\n\n" if receivers else ""))
    repeated = [replace(each, head=head + each.head) for each in sections]
    built.add_sections(own.rstrip() + "\n\n", repeated, (subject,) if subject else ())
    return body


def _best(alternatives: Sequence[tuple[str, HtmlText]]) -> list[HtmlText]:
    """Return the plain text; or HTML that says more, or both if they differ, since either may be a mere stub."""
    plain = [page for kind, page in alternatives if kind == "text/plain" and page.text.strip()][:1]
    rich = [page for kind, page in alternatives if kind != "text/plain" and page.text.strip()][-1:]
    if not plain or not rich:
        return plain or rich
    words, others = (set(words_of(page.text)) for page in (*plain, *rich))
    shared = len(words & others)
    if shared >= _SAME_SHARE * len(others):
        return plain
    return rich if shared >= _SAME_SHARE * len(words) else plain + rich


def _joined(pages: Sequence[HtmlText]) -> HtmlText:
    """Return these texts below each other."""
    pages = [page for page in pages if page.text.strip()]
    if len(pages) == 1:
        return pages[0]
    built, quotes = TextBuilder(), list[Extent]()
    for page in pages:
        built.add("\n" if built.length else "")
        quotes += [(built.length + start, built.length + end) for start, end in page.quotes]
        built.add_sections(page.text, page.sections)
    return HtmlText(built.text(), "", tuple(built.sections), tuple(quotes))


def _text(part: Message) -> tuple[str, str]:
    data = _bytes(part)
    charset = str(part.get_content_charset() or "ascii")
    with suppress(LookupError, UnicodeDecodeError):
        if charset not in ("us-ascii", "ascii"):
            return decode_as(data, charset).replace("\r\n", "\n"), ""
    try:
        return decode(data) if data.strip() else ("", "")
    except UnreadableDocument as error:  # the other messages of a mailbox can still be read
        return "", f"text of an e-mail left out: {error}"


def _attachment(part: Message) -> Attachment | None:
    """Return an attachment; None for images within the text, and for parts that mail programs do not show."""
    name, inside = _file_name(part), part.get_payload()
    if part.get_content_type() == "message/rfc822":
        if not isinstance(inside, list) or not isinstance(inside[0], Message):
            return None
        title = _header(inside[0], "Subject") or "e-mail"
        return Attachment(f"{title}.eml", inside[0].as_bytes(policy=compat32))
    is_picture = part.get_content_maintype() == "image" and part.get_content_disposition() != "attachment"
    return Attachment(_decoded_words(name), _bytes(part)) if name and not is_picture else None


def _file_name(part: Message) -> str | None:
    """Return the name of an attachment, without its damaged pieces; None without a name."""
    try:
        return part.get_filename()
    except (TypeError, ValueError, LookupError):  # numbered pieces of a name without numbers
        return "attachment"


def _bytes(part: Message) -> bytes:
    data = part.get_payload(decode=True)
    return data if isinstance(data, bytes) else b""
