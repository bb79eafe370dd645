"""Stages of a model and the part of each parameter a rank holds."""
