"""What every evaluation and benchmark reports with: `tables`, `figures`, `page`, and `write_files` below.

Knows no evaluation: each one describes its own rows and hands them over.
"""

from collections.abc import Mapping
from pathlib import Path

from kvweave.errors import InvalidRequest
from kvweave.files import write_atomically


def write_files(folder: Path, contents: Mapping[str, bytes]) -> list[Path]:
    """Write a report's files in this order, each one whole or not at all, and return their paths.

    Creates the folder. Raises InvalidRequest if it cannot be written to.
    """
    try:
        for name, content in contents.items():
            write_atomically(folder / name, [content])
    except OSError as error:
        raise InvalidRequest(
            f"the report cannot be written to {folder} ({error.strerror}); name another --output"
        ) from error
    return [folder / name for name in contents]
