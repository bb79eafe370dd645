"""Rank by step: values, their pictures, and which of these a page has."""
