"""All ranks' operations, matched and on one clock."""
