"""torch.profiler's trace files to columns."""
