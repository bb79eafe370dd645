"""Replays of the open straggler-trace form."""
