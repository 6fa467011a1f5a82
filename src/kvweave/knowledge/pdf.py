"""The text layer of a PDF, through pypdf (extra `pdf`)."""

import io
import logging
from types import ModuleType

from kvweave.errors import MissingExtra, UnreadableDocument


def read_pdf(data: bytes) -> tuple[str, str]:
    """Extract the text, pages set apart by a blank line, and the title from the metadata (may be empty).

    Raises:
        MissingExtra: pypdf is not installed.
        UnreadableDocument: encrypted, damaged, or without a text layer.
    """
    pypdf = _pypdf()
    try:
        reader = pypdf.PdfReader(io.BytesIO(data), strict=False)
        if reader.is_encrypted and not reader.decrypt(""):
            raise UnreadableDocument("PDF is encrypted; save a copy without a password")
        text = "\n\n".join(page.extract_text().strip() for page in reader.pages)
        title = str((reader.metadata and reader.metadata.title) or "")
    except UnreadableDocument:
        raise
    except pypdf.errors.DependencyError as error:
        raise UnreadableDocument("PDF is encrypted; save a copy without a password") from error
    except Exception as error:  # damage shows as any exception, from KeyError to RecursionError
        raise UnreadableDocument(f"damaged PDF ({type(error).__name__}: {error})") from error
    if not text.strip():
        raise UnreadableDocument("PDF without a text layer (scanned pages?); run it through OCR first")
    return text, title.strip()


def _pypdf() -> ModuleType:
    try:
        import pypdf  # optional, so not at the top
        import pypdf.errors
    except ImportError as error:
        raise MissingExtra("reading PDF needs pypdf: pip install 'kvweave[pdf]'") from error
    # Its remarks on sloppy files are not the user's business; what matters arrives as an exception. Set once
    # and for good, whichever thread comes first, and not where the application has chosen a level itself.
    remarks = logging.getLogger("pypdf")
    if remarks.level == logging.NOTSET:
        remarks.setLevel(logging.CRITICAL)
    module: ModuleType = pypdf
    return module
