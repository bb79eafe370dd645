"""How bad something is, from when on it counts, and what to do: values for rules and monitor."""
