"""From a question to an answer: options, retrieval, the pipeline, generation."""
