"""Reads runs: files to columns, columns to recordings, recordings to a run."""
