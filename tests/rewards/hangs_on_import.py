"""A reward module that never finishes to import, in C, holding the interpreter's lock."""

import re

re.match(r"(a|aa)+$", "a" * 200 + "b")
