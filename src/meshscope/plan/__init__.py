"""Will it fit, how fast will it be, which layout is best."""
