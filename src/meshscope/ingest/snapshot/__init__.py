"""torch.cuda's memory snapshots to columns."""
