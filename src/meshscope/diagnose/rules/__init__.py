"""The rules, one module per subject; `diagnose.registry` lists them."""
