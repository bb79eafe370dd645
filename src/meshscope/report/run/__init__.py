"""The report of one run: the analyses, what readers get beside them, its contents and its JSON."""
