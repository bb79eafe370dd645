"""Trace windows: torch.profiler for a few steps of chosen ranks, on a schedule or when asked."""
