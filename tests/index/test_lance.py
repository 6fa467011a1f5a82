"""Importing lancedb through `kvweave.index.lance` leaves out a package's `__init__.py`, and nobody can tell."""

import subprocess
import sys

SCRIPT = """
import sys
from kvweave.index.lance import lancedb
PACKAGE = "lance_namespace_urllib3_client"
assert PACKAGE + ".models" in sys.modules
assert PACKAGE + ".api" not in sys.modules
package = sys.modules[PACKAGE]
assert not hasattr(package, "never_defined")
assert PACKAGE + ".api" in sys.modules
from lance_namespace_urllib3_client import ApiClient, DataApi
assert package.ApiClient is ApiClient is package.api_client.ApiClient
assert package.__version__
import pydantic
try:
    DataApi().count_table_rows(id=object())
except pydantic.ValidationError:
    print("checked")
"""

ALREADY_IMPORTED = """
import lance_namespace_urllib3_client as package
before = dict(vars(package))
from kvweave.index.lance import lancedb
assert vars(package) == before
print("unchanged")
"""


def run(script: str) -> tuple[str, str]:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    return done.stdout, done.stderr


def test_the_rest_of_the_package_is_there_when_it_is_asked_for() -> None:
    assert run(SCRIPT) == ("checked\n", "")


def test_a_package_that_is_imported_already_stays_as_it_is() -> None:
    assert run(ALREADY_IMPORTED) == ("unchanged\n", "")
