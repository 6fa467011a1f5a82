import pytest

from kvweave.predict.outlook import Outlook
from kvweave.store.database import Database


@pytest.fixture
def database(tmp_path):
    """An empty database."""
    database = Database(tmp_path / "catalog.sqlite")
    yield database
    database.close()


@pytest.fixture
def outlook(database):
    """An outlook that knows nothing yet."""
    return Outlook(database)
