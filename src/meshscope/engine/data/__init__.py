"""Batches of tokens, the same for any layout."""
