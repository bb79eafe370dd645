"""Memory over time, by use, and in snapshots."""
