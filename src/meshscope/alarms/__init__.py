"""Watches runs without a screen."""
