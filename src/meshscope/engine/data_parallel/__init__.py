"""Gradients over data parallel ranks."""
