"""Many runs: one line each, kept in an index; a job's runs against each other; deletion by rule."""
