"""Runs elsewhere than in a folder: any storage that fsspec reaches, by URL."""
