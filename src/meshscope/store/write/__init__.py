"""What a recorder writes with: the standard library only."""
