"""How long a step takes, and where its constants come from."""
