"""What communication took, who waited for whom, how fast it was."""
