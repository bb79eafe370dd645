"""What a planner knows of a model, and where it learns it."""
