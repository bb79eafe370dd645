"""Saves a model in training and loads it on any other layout."""
