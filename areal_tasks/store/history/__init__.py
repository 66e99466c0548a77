"""The history of a run: its log, audit, signatures, and the differences of two runs."""
