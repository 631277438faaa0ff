"""The benchmarks. Results are kept as JSON lines in benchmarks/results/, each with what is needed to repeat it."""
