"""Reads e-mails (.eml) and mailboxes (.mbox) with the standard library.

Sender, date and subject are repeated with every chunk. Attachments become documents. If an e-mail is indexed itself, quotations of it
in replies are left out.
"""

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from email import message_from_bytes
from email.header import decode_header, make_header
from email.message import Message
from email.policy import compat32
from pathlib import Path
from typing import Final

from kvweave.documents.encodings import decode
from kvweave.documents.extracted import Attachment, Extracted, ReadContext, TextBuilder, clean
from kvweave.documents.html import Extent, HtmlText, read_html
from kvweave.errors import UnreadableDocument

_FROM_LINE: Final = re.compile(rb"(?:\A|\n\r?\n)From [^\n]*\n")
_ESCAPED_FROM: Final = re.compile(rb"^>(>*From )", re.MULTILINE)
_MESSAGE_ID: Final = re.compile(r"<[^<>\s]+>")
_ENCRYPTED: Final = frozenset({"multipart/encrypted", "application/pkcs7-mime", "application/x-pkcs7-mime"})
_HEADER_BYTES: Final = 1 << 16
_MAX_PARTS: Final = 1000

_QUOTED: Final = re.compile(r"^[ \t]?>.*$")
_ATTRIBUTION: Final = re.compile(r"^(?=.*\S).{0,300}[:：][ \t]*$")
_FORWARDED: Final = re.compile(
    r"^\s*-{2,}\s*(Original Message|Ursprüngliche Nachricht|Originalnachricht|Message d'origine|Mensaje original|"
    r"Messaggio originale|Oorspronkelijk bericht|原始邮件|Исходное сообщение)\s*-{2,}\s*$",
    re.IGNORECASE,
)
_HEADER_BLOCK: Final = re.compile(r"^\*?(From|Von|De|Da|Van|发件人|От)\s?[:：]\*?\s*\S")
_HEADER_NEXT: Final = re.compile(
    r"^\*?(Sent|Date|To|Gesendet|Datum|An|Envoyé|À|Enviado|Para|Inviato|A|Verzonden|Aan|发送时间|收件人|Отправлено|Кому)\s?[:：]"
)


def read_mail(data: bytes, ctx: ReadContext) -> Extracted:
    """Read one e-mail; raises UnreadableDocument if it is encrypted, or if the file is not an e-mail."""
    message = message_from_bytes(data.lstrip(), policy=compat32)
    if not message.keys() or not any(message.get(name) for name in ("From", "Date", "Subject", "Received")):
        raise UnreadableDocument("no e-mail: it has no sender, date or subject")
    if message.get_content_type() in _ENCRYPTED:
        raise UnreadableDocument("encrypted e-mail; save a decrypted copy")
    built = TextBuilder()
    attachments, notes = _add_message(built, message, ctx.known_messages)
    return Extracted(
        built.text(),
        _header(message, "Subject"),
        tuple(built.sections),
        notes,
        attachments=tuple(attachments),
    )


def read_mailbox(data: bytes, ctx: ReadContext) -> Extracted:
    """Read the messages of a mailbox in order. The name of an attachment begins with the number of its message."""
    if not data.startswith(b"From "):
        raise UnreadableDocument('no mailbox: it does not begin with "From "')
    messages = [message_from_bytes(each, policy=compat32) for each in _messages(data)]
    known = ctx.known_messages.union(*map(_ids, messages))
    built, attachments, notes = TextBuilder(), list[Attachment](), list[str]()
    encrypted = 0
    for number, message in enumerate(messages, 1):
        encrypted += message.get_content_type() in _ENCRYPTED
        found, doubts = _add_message(built, message, known)
        attachments += [Attachment(f"{number:04d} {each.name}", each.data) for each in found]
        notes += doubts
        ctx.alive()
    if encrypted:
        notes.append(f"{encrypted} of {len(messages)} messages are encrypted")
    return Extracted(
        built.text(), "", tuple(built.sections), tuple(dict.fromkeys(notes)), attachments=tuple(attachments)
    )


def _messages(data: bytes) -> Iterator[bytes]:
    # The standard library's mailbox.mbox needs a file on disk, and this mailbox may be an attachment or compressed.
    bounds = [(each.start(), each.end()) for each in _FROM_LINE.finditer(data)]
    ends = [start for start, _ in bounds[1:]] + [len(data)]
    for (_, start), end in zip(bounds, ends, strict=True):
        yield _ESCAPED_FROM.sub(rb"\1", data[start:end])


def message_ids(paths: Iterable[Path]) -> frozenset[str]:
    """Return the ids of the e-mails in these files; skip files that cannot be read."""
    found: set[str] = set()
    for path in paths:
        try:
            with open(path, "rb") as stream:
                beginning = stream.read(_HEADER_BYTES)
        except OSError:
            continue
        found |= _ids(message_from_bytes(beginning.lstrip(), policy=compat32))
    return frozenset(found)


def _ids(message: Message) -> set[str]:
    return set(_MESSAGE_ID.findall(str(message.get("Message-ID", ""))))


def _replies_to(message: Message) -> str:
    """Return the id of the e-mail that this one answers; empty if it answers none."""
    answered = _MESSAGE_ID.findall(str(message.get("In-Reply-To", "")))
    answered = answered or _MESSAGE_ID.findall(str(message.get("References", "")))[-1:]
    return answered[0] if answered else ""


# One message


def _add_message(
    built: TextBuilder, message: Message, known: frozenset[str]
) -> tuple[list[Attachment], tuple[str, ...]]:
    """Append a message as a section; return its attachments and notes."""
    subject = _header(message, "Subject")
    named = ((name, _header(message, name)) for name in ("From", "Date", "Subject"))
    head = clean("".join(f"{name}: {value}\n" for name, value in named if value)) + "\n"
    built.mark(heading=(subject,) if subject else (), head=head)
    receivers = _header(message, "To")
    page, attachments, notes = _body(message)
    body, sections = page.text, page.sections
    quotes = sorted([*page.quotes, *_plain_quotes(body)]) if _replies_to(message) in known else ()
    if quotes:
        body, sections = _without(body, quotes), ()  # their offsets are no longer right
    built.add(head + (f"To: {receivers[:500]}\n\n" if receivers else ""))
    repeated = [replace(each, head=head + each.head) for each in sections]
    built.add_sections(body.rstrip() + "\n\n", repeated, (subject,) if subject else ())
    return attachments, notes


def _header(message: Message, name: str) -> str:
    raw = message.get(name)
    if raw is None:
        return ""
    try:
        text = str(make_header(decode_header(str(raw))))
    except (LookupError, ValueError, UnicodeError):
        text = str(raw)
    if any("\udc80" <= each <= "\udcff" for each in text):  # bytes without a declared encoding
        text = decode(text.encode("utf-8", "surrogateescape")).text
    return " ".join(text.split())


def _body(message: Message) -> tuple[HtmlText, list[Attachment], tuple[str, ...]]:
    """Return the plain text (or the HTML, if there is no plain text), the attachments, and notes."""
    plain: list[str] = []
    pages: list[str] = []
    attachments: list[Attachment] = []
    notes: list[str] = []
    for part in _leaves(message):
        kind, name = part.get_content_type(), part.get_filename()
        if part.get_content_disposition() == "attachment" or name or kind not in ("text/plain", "text/html"):
            attachments += _attachment(part, kind, name)
            continue
        text, note = _text(part)
        (plain if kind == "text/plain" else pages).append(text)
        notes += [note] if note else []
    text = "\n\n".join(plain)
    page = HtmlText(text.lstrip(), "") if text.strip() or not pages else read_html("\n".join(pages))
    return page, attachments, tuple(notes)


def _leaves(message: Message) -> Iterator[Message]:
    """Yield the parts with content; an attached e-mail is one part."""
    pending = [message]
    for _ in range(_MAX_PARTS):
        if not pending:
            return
        part = pending.pop()
        inside = part.get_payload()
        if part.is_multipart() and part.get_content_type() != "message/rfc822" and isinstance(inside, list):
            pending += [each for each in reversed(inside) if isinstance(each, Message)]
        else:
            yield part


def _text(part: Message) -> tuple[str, str]:
    data = _bytes(part)
    charset = str(part.get_content_charset() or "")
    try:
        if charset and charset not in ("us-ascii", "ascii"):
            return data.decode(charset).replace("\r\n", "\n"), ""
    except (LookupError, UnicodeDecodeError):
        pass
    try:
        return decode(data) if data.strip() else ("", "")
    except UnreadableDocument as error:  # the other messages of a mailbox can still be read
        return "", f"text of an e-mail left out: {error}"


def _attachment(part: Message, kind: str, name: str | None) -> list[Attachment]:
    if kind == "message/rfc822":
        inside = part.get_payload()
        if not isinstance(inside, list) or not isinstance(inside[0], Message):
            return []
        title = _header(inside[0], "Subject") or "e-mail"
        return [Attachment(f"{title}.eml", inside[0].as_bytes(policy=compat32))]
    if not name or (
        part.get_content_maintype() == "image" and part.get_content_disposition() != "attachment"
    ):
        return []  # images within the text, and parts that mail programs do not show
    with contextlib.suppress(LookupError, ValueError, UnicodeError):
        name = str(make_header(decode_header(name)))
    return [Attachment(name, _bytes(part))]


def _bytes(part: Message) -> bytes:
    data = part.get_payload(decode=True)
    return data if isinstance(data, bytes) else b""


# Quotations


def _plain_quotes(text: str) -> list[Extent]:
    """Return start and end of each quoted line: with ">", announcing such lines, or below the header of a forwarded e-mail."""
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    quoted = [bool(_QUOTED.match(line.rstrip("\n"))) for line in lines]
    for n in range(len(lines)):
        bare = lines[n].rstrip("\n")
        following = lines[n + 1] if n + 1 < len(lines) else ""
        if _FORWARDED.match(bare) or (_HEADER_BLOCK.match(bare) and _HEADER_NEXT.match(following)):
            quoted[n:] = [True] * (len(lines) - n)
            break
        if quoted[n] and (n == 0 or not quoted[n - 1]):
            _add_attribution(lines, quoted, n)
    return [(starts[n], starts[n + 1]) for n, each in enumerate(quoted) if each]


def _add_attribution(lines: list[str], quoted: list[bool], first: int) -> None:
    """Mark the lines before a quotation as quoted if they announce it, such as "On Monday Zoé wrote:", often on two lines."""
    n = first - 1
    while n >= 0 and not lines[n].strip():
        n -= 1
    if n < 0 or not _ATTRIBUTION.match(lines[n].rstrip("\n")):
        return
    quoted[n:first] = [True] * (first - n)
    if n > 0 and re.match(r"^(On|Am|Le|El|Il|Op)\s.*\d", lines[n - 1]) and not quoted[n - 1]:
        quoted[n - 1] = True


def _without(text: str, quotes: Sequence[Extent]) -> str:
    """Return the text without the quotes, which may overlap, and without the lines that announce them."""
    kept, end = [], 0
    for start, stop in quotes:
        before = text[end : max(start, end)].rstrip()
        lines = before.splitlines(keepends=True)
        if (
            stop - start > 0
            and lines
            and _ATTRIBUTION.match(lines[-1])
            and any(each.isdigit() for each in lines[-1])
        ):
            before = "".join(lines[:-1]).rstrip()
        kept.append(before)
        end = max(end, stop)
    return re.sub(r"\n{3,}", "\n\n", "\n\n".join(filter(None, [*kept, text[end:].strip()])))
