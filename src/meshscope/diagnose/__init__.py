"""Rules that turn analyses into findings: what is wrong, what to change, what it would win."""
