import pytest

from kvweave.answer_cache.predictions import PredictionStore
from kvweave.database import Database
from kvweave.models.prompt import PromptTemplate
from kvweave.testing import tiny_tokenizer


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


@pytest.fixture
def template():
    """Renders prompts for a tokenizer without a chat template."""
    return PromptTemplate(tiny_tokenizer())
