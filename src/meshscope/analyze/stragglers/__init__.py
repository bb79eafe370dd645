"""Slow ranks, steps and sets of ranks."""
