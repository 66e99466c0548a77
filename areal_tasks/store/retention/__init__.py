"""What is kept and what is removed: gc, tags, tombstones, compactions."""
