"""What a file's name tells about its content."""

from pathlib import PurePath
from typing import Final

MARKDOWN: Final = frozenset({".md", ".markdown", ".mdown", ".mkd"})
HTML: Final = frozenset({".html", ".htm", ".xhtml"})

_WITHOUT_TEXT: Final = {
    "an image": "png jpg jpeg gif bmp tif tiff webp ico icns psd heic avif xcf",
    "sound or video": "mp3 wav flac ogg oga m4a aac mp4 m4v mkv mov avi webm wmv",
    "an archive": "zip tar tgz tbz2 txz bz2 xz zst lz4 7z rar jar war whl egg deb rpm apk iso dmg cab",
    "a program or library": "exe dll so dylib a o obj lib class pyc pyo pyd wasm elf ko",
    "a font": "ttf otf woff woff2 eot",
    "a database or model": "sqlite sqlite3 mdb parquet arrow feather npy npz pt pth safetensors onnx gguf h5 pkl pickle",
    "an office file, which is not supported yet": "doc docx xls xlsx ppt pptx odt ods odp epub mobi djvu ps",
}
_KINDS: Final = {
    f".{suffix}": kind for kind, suffixes in _WITHOUT_TEXT.items() for suffix in suffixes.split()
}


def content_suffix(name: str) -> str:
    """Return the suffix that tells the content, in lower case: "guide.HTML.gz" gives ".html", "README" gives ""."""
    path = PurePath(name)
    if path.suffix.lower() == ".gz":
        path = PurePath(path.stem)
    return path.suffix.lower()


def kind_without_text(name: str) -> str | None:
    """Return the kind of a file that holds no readable text, such as "an image (.png)"; None for all other files."""
    suffix = content_suffix(name)
    return f"{_KINDS[suffix]} ({suffix})" if suffix in _KINDS else None
