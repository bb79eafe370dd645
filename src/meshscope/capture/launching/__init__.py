"""Starts a program under the recorder: what `meshscope run` does."""
