import pytest

from kvweave.database import Database
from kvweave.predict.store import PredictionStore


@pytest.fixture
def database(tmp_path):
    """An empty database."""
    database = Database(tmp_path / "catalog.sqlite")
    yield database
    database.close()


@pytest.fixture
def predictions(database):
    """An empty prediction store."""
    return PredictionStore(database)
