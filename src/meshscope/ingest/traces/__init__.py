"""One trace to what a recorder would have written."""
