"""A test bed of machines that share nothing: `bed.py` makes them."""
