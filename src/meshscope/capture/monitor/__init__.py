"""Statistics that a program can ask for while it trains."""
