"""The models that a knowledge base was made with, for a server that is to load them. Loads no model."""

from dataclasses import replace

from kvweave.config import Config
from kvweave.database import Database
from kvweave.engine.metadata import KBMetadata
from kvweave.engine.state import kb_folder


def with_recorded_models(config: Config, name: str) -> Config:
    """Return the settings; what they leave open of the models is as the knowledge base `name` records it, if it is there."""
    path = kb_folder(name, config) / "catalog.sqlite"
    if not path.exists():
        return config
    database = Database(path)
    try:
        metadata = KBMetadata(database, name, config)
        wanted, recorded = config.model, metadata.get
        model = replace(
            wanted,
            model=wanted.model or recorded("model_name"),
            dtype=wanted.dtype if wanted.dtype != "auto" else recorded("model_dtype") or "auto",
            weights=wanted.weights if wanted.weights != "auto" else metadata.weight_bits,
        )
        embedding = config.embedding.embedding_model or recorded("embedding_source")
    finally:
        database.close()
    return replace(config, model=model, embedding=replace(config.embedding, embedding_model=embedding))
