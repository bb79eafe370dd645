"""Summaries → one JSON document, and that document → text for a terminal."""
