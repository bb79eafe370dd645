"""Store tables → typed summaries: pure functions over one attempt, numpy only."""
