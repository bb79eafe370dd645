"""Files of other tools, read into the columns of the store."""
