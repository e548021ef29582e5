"""The one exception that the command line turns into a single line on stderr."""


class UserError(Exception):
    """Bad input or environment: the message names what was wrong and what is accepted.

    ``python -m loadtest`` prints the message as one line on stderr and exits with status 2.
    """
