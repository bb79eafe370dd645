"""Runs a pipeline schedule."""
