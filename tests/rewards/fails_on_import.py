"""A reward module that raises when it is imported."""

WRONG = 1 / 0
