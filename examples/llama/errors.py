"""The error that ends a program of this example with one line."""


class UserError(ValueError):
    """What was asked for is not possible; the message says why and what to do."""
