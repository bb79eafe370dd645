"""What is installed here, what would be recorded here, and what is missing."""
