"""The one exception for what a person can mend: printed without a traceback."""


class UserError(Exception):
    """A mistake in a recipe, an argument or the surroundings. The message names the cause and the remedy."""
