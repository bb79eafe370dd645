"""Media: each module shows sections in one of them."""
