"""Rules about communication: what is not hidden, and what need not be sent."""
