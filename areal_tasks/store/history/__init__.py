"""What became of a run: its log, audit, signatures, and how two runs differ."""
