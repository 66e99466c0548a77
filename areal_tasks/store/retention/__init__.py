"""Removal and merging of files: gc, tombstones, compactions."""
