"""How ranks are started, meet, fail and are asked to stop."""
