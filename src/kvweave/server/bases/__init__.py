"""Knowledge bases over HTTP: documents, questions, conversations, caches."""
