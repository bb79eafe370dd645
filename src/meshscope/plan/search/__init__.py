"""The best of all layouts."""
