"""Which context tokens matter: what questions and answers attend to, and which selections find it."""
