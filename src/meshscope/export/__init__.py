"""What a run becomes in other tools' formats: traces for Perfetto, and tables."""
