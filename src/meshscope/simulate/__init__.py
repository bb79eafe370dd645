"""What a recorded run would have taken, had something been different."""
