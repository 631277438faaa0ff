"""The four verbs of development, the same by hand and in CI: `python -m tasks fix|check|test|bench`."""
