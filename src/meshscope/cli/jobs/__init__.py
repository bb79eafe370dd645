"""Commands that start a job or talk to one, and what a job shows while it runs."""
