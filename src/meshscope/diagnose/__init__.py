"""Rules that turn analyses into findings: what is wrong, what to change, and what that saves."""
