"""Why a job is stuck. Asks live processes, so it stands outside of the pure rooms."""
