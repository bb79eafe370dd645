"""Follows a run while it is recorded: what is new, at little cost, and a whole report now and then.

It knows nothing of screens and servers: `follower.Follower` is its face.
"""
