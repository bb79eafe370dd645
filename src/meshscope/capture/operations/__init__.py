"""Communication of one rank."""
