"""Other schedules and stages."""
