"""What the torch replacements do not do."""


def refuse_given(**arguments) -> None:
    """Raises NotImplementedError naming the arguments that are not None (or False)."""
    given = [name for name, value in arguments.items() if value is not None and value is not False]
    if given:
        raise NotImplementedError(f"{', '.join(given)}: not on the RaggedKV CPU platform")
