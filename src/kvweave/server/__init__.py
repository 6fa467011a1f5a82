"""HTTP: the routes of the OpenAI API, of knowledge bases and of operations, over `server.serving`."""
