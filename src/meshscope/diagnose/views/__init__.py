"""What rules look at together: devices, hardware, pipelines, stacks, ranks that stopped."""
