"""Loss, gradient norm and skipped updates."""
