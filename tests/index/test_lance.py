"""Importing lancedb through `kvweave.index.lance` changes nothing for others."""

import subprocess
import sys

SCRIPT = """
import pydantic
before = pydantic.validate_call
from kvweave.index.lance import lancedb
assert pydantic.validate_call is before
from lance_namespace_urllib3_client.api.data_api import DataApi
try:
    DataApi().count_table_rows(id=object())
except pydantic.ValidationError:
    print("checked")
"""


def test_methods_still_check_their_arguments() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("checked\n", "")
