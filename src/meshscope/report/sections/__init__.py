"""One module per subject: analyses in, sections out."""
