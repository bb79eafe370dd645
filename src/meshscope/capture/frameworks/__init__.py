"""Frameworks that train for the program: what they were told, learned where they are imported."""
