"""Vocabulary shared by every stage: pure Python, no torch, no files."""
