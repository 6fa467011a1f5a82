"""The models that a knowledge base was made with, for a server that is to load them. Loads no model."""

from dataclasses import replace

from kvweave.config import Config
from kvweave.database import Database
from kvweave.state.knowledge_base_state import kb_folder
from kvweave.state.metadata import KBMetadata


def with_recorded_models(config: Config, name: str) -> Config:
    """Return the settings; what they leave open of the models is as the knowledge base `name` records it, if it is there."""
    path = kb_folder(name, config) / "catalog.sqlite"
    if not path.exists():
        return config
    database = Database(path)
    try:
        metadata = KBMetadata(database, name, config)
        model = metadata.model_settings
        embedding = config.embedding.embedding_model or metadata.get("embedding_source")
    finally:
        database.close()
    return replace(config, model=model, embedding=replace(config.embedding, embedding_model=embedding))
