"""The open straggler-trace form."""
